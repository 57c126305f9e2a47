"""From a config.json to a model on the meta device: no weights, no memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright._errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_config(path: str | Path) -> Any:
    """A Hugging Face config from its config.json (or from the directory that holds one)."""
    from transformers import AutoConfig

    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        fields = json.loads(path.read_text())
        model_type = fields.pop("model_type")
    except FileNotFoundError:
        raise InputError(f"{path}: found no file; allowed: a Hugging Face config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: found {error}; allowed: a Hugging Face config.json") from None
    except (KeyError, AttributeError, TypeError):
        raise InputError(
            f"{path}: model_type: found nothing; allowed: the model_type of a Hugging Face model"
        ) from None
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # whatever a config class finds wrong with its fields, in one line
        raise InputError(f"{path}: found {' '.join(str(error).split())}; allowed: a Hugging Face config") from None
    return config


def of_blocks(config: Any, blocks: Sequence[int]) -> Any:
    """The config of the model that has only these of its blocks."""
    few = copy.deepcopy(config)
    few.num_hidden_layers = len(blocks)
    if getattr(config, "layer_types", None):
        few.layer_types = [config.layer_types[block] for block in blocks]
    return few


def build_meta(config: Any, dtype: str = "float32") -> Any:
    """The Hugging Face causal language model of ``config``, its parameters on the meta device in ``dtype``."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
