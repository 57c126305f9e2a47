"""Strict reading of the YAML files that users own (plan, cluster, run): plain data, checked against a schema."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from shardwright.errors import InputError
from shardwright.files.messages import Key, one_line, report
from shardwright.files.old_words import Renamed, current
from shardwright.files.plain_yaml import parse

Model = TypeVar("Model", bound=BaseModel)

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
"""What every schema of a user file sets: no unknown keys, no silent conversion ("4" is not 4), frozen."""


def _whole(value: Any) -> int:
    if type(value) is not int:  # to Literal[1], true and 1.0 would be 1
        raise ValueError("not a whole number")
    return value


Version1 = Annotated[Literal[1], BeforeValidator(_whole)]
"""The ``version`` of a schema that has had no other."""
Version2 = Annotated[Literal[2], BeforeValidator(_whole)]
"""The ``version`` of a schema whose first had other words (old_words.py)."""


def read_yaml(path: str | os.PathLike[str], schema: type[Model], renamed: tuple[Renamed, ...] = ()) -> Model:
    """The file at ``path`` as a checked ``schema``.

    Plain YAML only: no tags, no duplicate keys, no value read as something else than it looks (``no`` is a word, 1e-3 a
    number, 010 is ten). Validators find the file's directory as ``info.context["directory"]``, an absolute Path.
    renamed: fields that had another word in version 1, which is read too.

    Raises InputError, one line, for the first fault in file order, with the number of further ones.
    """
    where = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(one_line(f"{where}: found no such file; allowed: the path of a YAML file")) from None
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise InputError(one_line(f"{where}: found no way in ({found.lower()}); allowed: a YAML file")) from None
    except UnicodeDecodeError as error:
        raise InputError(
            one_line(f"{where}: found bytes that are not UTF-8 ({error.reason}); allowed: UTF-8")
        ) from None
    data, lines = parse(where, text)
    if renamed:
        data, lines = current(where, data, lines, renamed)
    directory = Path(os.path.abspath(path)).parent
    return check(data, schema, where, lines=lines, context={"directory": directory})


def check(
    data: Mapping[str, Any],
    schema: type[Model],
    where: str,
    *,
    lines: Mapping[Key, tuple[int, int]] | None = None,
    context: Mapping[str, Any] | None = None,
) -> Model:
    """``data`` as a checked ``schema``; raises InputError, one line that begins with ``where``.

    lines: key → (first line, last line), counted from 1, of data that came from a file.
    """
    try:
        return schema.model_validate(data, context=dict(context) if context else None)
    except ValidationError as error:
        raise InputError(report(error, data, schema, where, lines or {})) from None
