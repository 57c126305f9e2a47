"""Kinds of files that documents come from: a kind is one file here, with a ``documents(paths, field)`` of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardwright.train.sources import jsonl, parquet, text

KINDS: dict[str, Callable[[Iterable[Path], str], Iterator[str]]] = {
    "text": text.documents,
    "jsonl": jsonl.documents,
    "parquet": parquet.documents,
}
"""Kinds by the name that run files use."""


def documents(kind: str, paths: Iterable[Path | str], field: str = "text") -> Iterator[str]:
    """The documents of the files, one at a time, files in the sorted order of their paths, each file once.

    kind: text, jsonl or parquet. field: the JSON key, or parquet column, that holds a document.
    Raises InputError, one line that names the file and the line or row, at the first one that holds none.
    """
    return KINDS[kind]([Path(path) for path in sorted({Path(path).as_posix() for path in paths})], field)
