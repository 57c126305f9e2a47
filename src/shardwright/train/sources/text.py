"""Text files: each is one document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwright.errors import InputError


def documents(paths: Iterable[Path], field: str) -> Iterator[str]:
    """The text of each file, which may be empty; what is not UTF-8 is replaced. ``field`` has no meaning here."""
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: found no way in ({error.strerror}); allowed: a file that can be read") from None
        yield data.decode("utf-8", errors="replace")
