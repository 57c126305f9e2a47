"""Parquet files: each row holds a document in one column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.train.extras import check_extra

ROWS = 1024
"""The most rows that are held at a time; they are of one row group."""


def documents(paths: Iterable[Path], field: str) -> Iterator[str]:
    """The text of each row in the column ``field``; no more than one row group of it is in memory.

    Raises InputError for a row or file that holds no such text, and where the package pyarrow is not installed.
    """
    check_extra("parquet", ("data", "parquet"))
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    for path in paths:
        try:
            # memory_map and pre_buffer would hold more of the file than the rows being read
            with ParquetFile(path, memory_map=False, pre_buffer=False) as file:
                _check(file, field, path)
                row = 0
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(ROWS, row_groups=[group], columns=[field], use_threads=False):
                        for value in batch.column(0):
                            row += 1
                            yield _document(value, field, path, row)
        except (ArrowException, OSError) as error:
            what = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{path}: found no parquet that can be read ({what}); allowed: a parquet file") from None


def _check(file: Any, field: str, path: Path) -> None:
    """The column is there, once, and holds text."""
    from pyarrow import types

    schema = file.schema_arrow
    if schema.names.count(field) != 1:
        found = f"{schema.names.count(field)} columns {field!r}" if field in schema.names else f"no column {field!r}"
        raise InputError(f"{path}: found {found}; allowed: as data field one of {', '.join(schema.names) or 'none'}")
    kind = schema.field(field).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)):
        raise InputError(f"{path}: {field}: found a column of {kind}; allowed: a column of string")
    if file.metadata.num_rows == 0:
        raise InputError(f"{path}: found an empty file; allowed: one document a row")


def _document(value: Any, field: str, path: Path, row: int) -> str:
    try:
        document = value.as_py()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: {field} (row {row}): found bytes that are not UTF-8 ({error.reason}); allowed: text"
        ) from None
    if document is None:
        raise InputError(f"{path}: {field} (row {row}): found null; allowed: text")
    return str(document)
