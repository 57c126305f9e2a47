"""Documents from text, JSON lines and parquet: the same ones, in order, and each fault one line that says where."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shardwright.errors import InputError
from shardwright.train.run_file import FILES
from shardwright.train.sources import KINDS, documents

DOCUMENTS = ["first", "", "größe → 𝔘\n\tand a second line\r\n", "x" * 5000, "last"]


def write(path: Path, kind: str, texts: Sequence[Any], field: str = "text") -> Path:
    """A file of that kind with these documents (a text file holds one)."""
    if kind == "text":
        (text,) = texts
        path.write_bytes(text.encode())
    elif kind == "jsonl":
        import json

        path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)))
    else:
        parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, row_group_size=2)
    return path


def fault(kind: str, path: Path, field: str = "text") -> str:
    """What is said of a file, without its name."""
    with pytest.raises(InputError) as caught:
        list(documents(kind, [path], field))
    message = str(caught.value)
    assert message.splitlines() == [message] and message.startswith(f"{path}: ")
    assert "; allowed: " in message
    return message.removeprefix(f"{path}: ")


def test_a_kind_for_every_list_of_a_run_file() -> None:
    assert list(KINDS) == list(FILES)


@pytest.mark.parametrize("field", ["text", "body"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_come_back_as_they_were_files_in_sorted_order(kind: str, field: str, tmp_path: Path) -> None:
    if kind == "text":
        paths = [write(tmp_path / f"{n}.txt", kind, [text]) for n, text in enumerate(DOCUMENTS)]
    else:
        paths = [write(tmp_path / "0", kind, DOCUMENTS[:3], field), write(tmp_path / "1", kind, DOCUMENTS[3:], field)]
    assert list(documents(kind, [*reversed(paths), str(paths[0])], field)) == DOCUMENTS


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_before_it_is_asked_for(kind: str, tmp_path: Path) -> None:
    found = documents(kind, [write(tmp_path / "0", kind, ["first"]), tmp_path / "gone"])
    assert next(found) == "first"
    with pytest.raises(InputError, match=r"gone: found no .*; allowed: a"):
        next(found)


def test_text_that_is_not_utf_8_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a\xffb")
    assert list(documents("text", [tmp_path / "a"])) == ["a\ufffdb"]


LINES = {
    b'{"text": "b"': "(line 2): found no JSON (Expecting ',' delimiter at column 13); allowed: one JSON object a line",
    b"text": "(line 2): found no JSON (Expecting value at column 1); allowed: one JSON object a line",
    b'"text"': "(line 2): found 'text'; allowed: one JSON object a line",
    b'["text"]': "(line 2): found a list of 1; allowed: one JSON object a line",
    b'{"body": 1, "id": 2}': "text (line 2): found nothing; allowed: text, or a data field that is there (body, id)",
    b"{}": "text (line 2): found nothing; allowed: text, or a data field that is there (none)",
    b'{"text": 3}': "text (line 2): found 3; allowed: text",
    b'{"text": null}': "text (line 2): found null; allowed: text",
    b'{"text": ["a"]}': "text (line 2): found a list of 1; allowed: text",
    b'{"text": "\xff"}': "(line 2): found bytes that are not UTF-8 (invalid start byte); allowed: UTF-8",
    b'{"text": "\\ud83d"}': "text (line 2): found half a surrogate pair; allowed: text that UTF-8 can hold",
    b'{"text": "\t"}': "(line 2): found no JSON (Invalid control character at at column 11); allowed: one...",
    b"[" * 100000: "(line 2): found hundreds of nested values; allowed: one JSON object a line",
    b'{"n": ' + b"9" * 5000 + b"}": "(line 2): found a number of thousands of digits; allowed: one JSON object a line",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20].decode(errors="replace"))
def test_a_bad_line_is_told_by_its_number(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
    expected = LINES[line]
    told = fault("jsonl", path)
    assert told.startswith(expected[:-3]) if expected.endswith("...") else told == expected


def test_json_lines_with_a_mark_blank_lines_and_no_last_line_break(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert list(documents("jsonl", [tmp_path / "a"])) == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_json_lines_without_any(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    assert fault("jsonl", tmp_path / "a") == "found an empty file; allowed: one JSON object a line"


def test_a_json_lines_file_that_is_a_directory(tmp_path: Path) -> None:
    assert fault("jsonl", tmp_path).startswith("found no way in (Is a directory)")


def test_parquet_faults_name_column_and_row(tmp_path: Path) -> None:
    def table(column: Any) -> Path:
        parquet.write_table(pyarrow.table({"id": range(len(column)), "text": column}), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    assert fault("parquet", table(["a"]), "body") == "found no column 'body'; allowed: as data field one of id, text"
    assert fault("parquet", table([1, 2])) == "text: found a column of int64; allowed: a column of string"
    assert fault("parquet", table([b"a"])) == "text: found a column of binary; allowed: a column of string"
    assert fault("parquet", table([["a"]])).startswith("text: found a column of list<")
    assert fault("parquet", table(["a", "b", None])) == "text (row 3): found null; allowed: text"
    assert fault("parquet", table(pyarrow.array([], pyarrow.string()))).startswith("found an empty file")
    wrong = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"a", b"\xff"]).buffers())
    assert fault("parquet", table(wrong)).startswith("text (row 2): found bytes that are not UTF-8")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    assert fault("parquet", tmp_path / "a.parquet").startswith("found 2 columns 'text'")


def test_parquet_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", "parquet", ["text " * 1000] * 10)
    whole = path.read_bytes()
    for content in (b"", b"PAR1", b"no parquet at all", whole[:-200], whole[:4] + b"\xff" * 400 + whole[404:]):
        path.write_bytes(content)
        assert fault("parquet", path).startswith("found no parquet that can be read (")


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
    ids=str,
)
def test_parquet_columns_of_every_kind_of_text(kind: pyarrow.DataType, tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b", "a"]).cast(kind)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert list(documents("parquet", [tmp_path / "a.parquet"])) == ["a", "b", "a"]


def test_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    import random

    source = random.Random(0)
    texts = [source.randbytes(2**15).hex() for _ in range(256)]  # 16 groups of 1 MiB
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=16)
    del texts
    before, most = pyarrow.total_allocated_bytes(), 0
    for _ in documents("parquet", [path]):
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert path.stat().st_size > 8 * 2**20
    assert most < 6 * 2**20  # pages of a group, packed and unpacked


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", "parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # import finds no such package
    with pytest.raises(InputError, match=r"^data\.parquet: found .*pip install 'shardwright\[parquet\]'$"):
        list(documents("parquet", [path]))
