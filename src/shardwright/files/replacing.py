"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.errors import InputError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` to write to; it is moved over ``path`` when the block ends without error.

    Raises InputError where the directory cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        found = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{path}: found {found}; allowed: a path in a writable directory") from None


def check_directory(path: str | os.PathLike[str], key: str) -> None:
    """Raises InputError, for the option ``key``, unless a file can be put at ``path``: before long work, not after."""
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{key}: found {path}; allowed: a file in a directory that exists")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text`` as UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
