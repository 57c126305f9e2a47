"""A Hugging Face config.json as it stands in its file: what can be said of it before transformers is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.files.messages import found_text

LONGEST = 120
"""Characters of what somebody else says that one line has room for."""


def short(text: object) -> str:
    """What somebody else says, on one line, cut where it is long."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def config_file(path: str | os.PathLike[str]) -> Path:
    """The config.json that a path names, which may be that of its directory."""
    path = Path(path)
    return path / "config.json" if path.is_dir() else path


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json, its ``model_type`` among them.

    Raises InputError, one line, where there are none, for code that comes with the config (which is never run), and for
    quantized weights.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: found no file; allowed: a Hugging Face config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: found {short(error)}; allowed: a Hugging Face config.json") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path}: found {found_text(fields)}; allowed: a mapping, as in a Hugging Face config.json")

    def refuse(field: str, found: str, allowed: str) -> InputError:
        return InputError(f"{path}: {field}: found {found}; allowed: {allowed}")

    if fields.get("auto_map"):
        raise refuse("auto_map", "code that comes with the config", "none: only transformers' own models are run")
    if fields.get("quantization_config") is not None:
        raise refuse("quantization_config", "quantized weights", "weights of float32, bfloat16 or float64")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        found = "nothing" if model_type is None else found_text(model_type)
        raise refuse("model_type", found, "the model_type of a Hugging Face model")
    return fields
