"""Words of a file's first version: read as the ones that took their place, with one line that says what to write."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.errors import InputError
from shardwright.files.messages import Key, dotted

VERSION: Literal[2] = 2
"""The version of a plan and of a cluster file; in version 1 some fields had other words."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renamed:
    """A field that was renamed. holder: the keys that lead to what holds it; ``*`` stands for every item of a list."""

    holder: tuple[str, ...]
    old: str
    new: str


def current(
    where: str, data: dict[str, Any], lines: dict[Key, tuple[int, int]], renamed: tuple[Renamed, ...]
) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    """A file's ``data`` and ``lines`` as its newest version has them; ``where`` names the file.

    A file of version 1 is told of by one line of the log. Raises InputError, one line, where a file states both words
    of a field, or the old one in a newer version.
    """
    version = data.get("version")
    old_file = type(version) is int and version == 1
    found: dict[Key, Renamed] = {}
    for field in renamed:
        for holder in _holders(data, field.holder, field.old):
            found[(*holder, field.old)] = field
    for key, field in found.items():
        at = f"{where}: {dotted(key)} (line {lines[key][0]})"
        if field.new in _at(data, key[:-1]):
            raise InputError(f"{at}: found it beside {field.new}; allowed: {field.new} alone")
        if not old_file:
            raise InputError(f"{at}: found the word of version 1; allowed: {field.new}")
    if not old_file:
        return data, lines
    words = {field.old: field.new for field in found.values()}
    advice = [f"version: {VERSION}", *(f"{new} for {old}" for old, new in words.items())]
    _log.warning("%s: found version 1, which is read still; write %s", where, ", ".join(advice))
    for key, field in found.items():
        holder = _at(data, key[:-1])
        values = {field.new if name == field.old else name: value for name, value in holder.items()}
        holder.clear()
        holder.update(values)
    moved = {(*key[:-1], found[key].new) if key in found else key: span for key, span in lines.items()}
    return data | {"version": VERSION}, moved


def _holders(value: Any, way: tuple[str, ...], old: str, key: Key = ()) -> Iterator[Key]:
    """Where ``old`` is stated in what ``way`` leads to."""
    if not way:
        if isinstance(value, dict) and old in value:
            yield key
    elif way[0] == "*":
        for index, item in enumerate(value if isinstance(value, list) else ()):
            yield from _holders(item, way[1:], old, (*key, index))
    elif isinstance(value, dict) and way[0] in value:
        yield from _holders(value[way[0]], way[1:], old, (*key, way[0]))


def _at(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data
