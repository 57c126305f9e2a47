"""JSON lines: each line is an object, one key of which holds a document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.files.messages import found_text

OBJECT = "one JSON object a line"


def documents(paths: Iterable[Path], field: str) -> Iterator[str]:
    """The text at the key ``field`` of each line, one line in memory at a time; blank lines are skipped.

    Raises InputError for a line that holds no such text, and for a file without any.
    """
    for path in paths:
        empty = True
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _document(line, field, path, number)
                        empty = False
        except OSError as error:
            raise InputError(f"{path}: found no way in ({error.strerror}); allowed: a file that can be read") from None
        if empty:
            raise InputError(f"{path}: found an empty file; allowed: {OBJECT}")


def _document(line: bytes, field: str, path: Path, number: int) -> str:
    try:
        value: Any = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: (line {number}): found bytes that are not UTF-8 ({error.reason}); allowed: UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: (line {number}): found no JSON ({error.msg} at column {error.colno}); allowed: {OBJECT}"
        ) from None
    except ValueError:
        raise InputError(f"{path}: (line {number}): found a number of thousands of digits; allowed: {OBJECT}") from None
    except RecursionError:
        raise InputError(f"{path}: (line {number}): found hundreds of nested values; allowed: {OBJECT}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: (line {number}): found {found_text(value)}; allowed: {OBJECT}")
    if field not in value:
        keys = ", ".join(map(str, value)) or "none"
        raise InputError(
            f"{path}: {field} (line {number}): found nothing; allowed: text, or a data field that is there ({keys})"
        )
    document = value[field]
    if not isinstance(document, str):
        raise InputError(f"{path}: {field} (line {number}): found {found_text(document)}; allowed: text")
    try:
        document.encode()
    except UnicodeEncodeError:  # JSON can spell one half of a surrogate pair
        raise InputError(
            f"{path}: {field} (line {number}): found half a surrogate pair; allowed: text that UTF-8 can hold"
        ) from None
    return document
