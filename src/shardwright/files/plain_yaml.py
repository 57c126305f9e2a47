"""Plain YAML: text to data with the line of every key, and data to text. No tags, no surprises about types."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from shardwright.errors import InputError
from shardwright.files.messages import Key, dotted, found_text, one_line, short
from shardwright.files.replacing import write_text

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes with YAML 1.2's plain scalars; nothing is ever constructed from a tag."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (yaml's own way)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or YAML 1.2 would read as something else than text; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escapes line breaks of every kind, which the plain and single-quoted styles would fold."""
        return self.represent_scalar(_TAG + "str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


def parse(where: str, text: str) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    """Plain data, and (first line, last line) of every key. Raises InputError, one line that begins with ``where``."""
    reader = _Reader(where)
    try:
        root = yaml.compose(text, Loader=_Loader)
        found = "an empty file" if root is None else None
        data = None if root is None else reader.value((), root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"(line {mark.line + 1}): " if mark else ""
        problem = (error.problem or error.context or "a fault").removeprefix("found ").removeprefix("but found ")
        allowed = "one YAML document of keys and values (indent with spaces, quote words that hold : # { [ * &)"
        raise InputError(one_line(f"{where}: {at}found {problem}; allowed: {allowed}")) from None
    except yaml.YAMLError as error:  # characters that no YAML file may hold
        raise InputError(one_line(f"{where}: found {str(error).splitlines()[0]}; allowed: printable text")) from None
    except RecursionError:
        raise InputError(one_line(f"{where}: found hundreds of nested values; allowed: a few")) from None
    if not isinstance(data, dict):
        raise InputError(one_line(f"{where}: found {found or found_text(data)}; allowed: a mapping of keys to values"))
    return data, reader.lines


class _Reader:
    """Nodes to plain values; ``lines`` tells where each key was found."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.lines: dict[Key, tuple[int, int]] = {}

    def value(self, key: Key, node: yaml.Node, open_nodes: tuple[int, ...]) -> Any:
        """The value of ``node``, which stands at ``key``; open_nodes: those that contain it."""
        if id(node) in open_nodes:
            raise self._fault(key, node, "an alias of a value that contains it", "values that end")
        inside = (*open_nodes, id(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(key, node)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise self._fault(key, node, f"the tag {short(node.tag)}", "plain YAML without tags")
        if isinstance(node, yaml.SequenceNode):
            return self._items(key, node, inside)
        return self._mapping(key, node, inside)

    def _items(self, key: Key, node: yaml.SequenceNode, inside: tuple[int, ...]) -> list[Any]:
        items = []
        for index, child in enumerate(node.value):
            self.lines[(*key, index)] = _span(child, child)
            items.append(self.value((*key, index), child, inside))
        return items

    def _mapping(self, key: Key, node: yaml.Node, inside: tuple[int, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name_node, child in node.value:
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != _TAG + "str":
                shown = name_node.value if isinstance(name_node, yaml.ScalarNode) else "a list or mapping"
                allowed = "keys that are text (in quotes where they look otherwise)"
                raise self._fault(key, name_node, f"the key {shown}", allowed)
            name: str = name_node.value
            here = (*key, name)
            if name in data:
                again = f"the key a second time (first on line {self.lines[here][0]})"
                raise self._fault(here, name_node, again, "each key once")
            self.lines[here] = _span(name_node, child)
            data[name] = self.value(here, child, inside)
        return data

    def _scalar(self, key: Key, node: yaml.ScalarNode) -> Any:
        word, tag = node.value, node.tag.removeprefix(_TAG)
        try:
            if tag == "str":
                return word
            if tag == "null":
                return None
            if tag == "bool":
                return {"true": True, "false": False}[word.lower()]
            if tag == "int":
                return int(word)
            if tag == "float":
                return float(word.replace(".inf", "inf").replace(".nan", "nan").lower()) if "." in word else float(word)
        except (KeyError, ValueError):
            found = f"{len(word)} digits" if tag == "int" and len(word) > 80 else f"{short(word)} tagged as {tag}"
            raise self._fault(key, node, found, "plain values of a usual size") from None
        raise self._fault(key, node, f"the tag {short(node.tag)}", "plain YAML without tags")

    def _fault(self, key: Key, node: yaml.Node, found: str, allowed: str) -> InputError:
        name = f"{dotted(key)} " if key else ""
        line = node.start_mark.line + 1
        return InputError(one_line(f"{self.where}: {name}(line {line}): found {found}; allowed: {allowed}"))


def _span(first: yaml.Node, last: yaml.Node) -> tuple[int, int]:
    end = last.end_mark
    return first.start_mark.line + 1, max(first.start_mark.line + 1, end.line + (1 if end.column else 0))


def write_yaml(path: str | os.PathLike[str], data: Mapping[str, Any], header_comment: str) -> None:
    """Writes ``data`` in its own order under ``header_comment``, whole or not at all.

    Raises InputError where the directory cannot be written.
    """
    comment = "".join(f"# {line}\n" for line in header_comment.splitlines())
    body = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    write_text(path, comment + body)
