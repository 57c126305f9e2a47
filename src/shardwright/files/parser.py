"""Strict reading and careful writing of the YAML files that users own (plan, cluster, run), and of sizes in bytes.

Every fault is one line: ``<file>: <key> (line N): found <what>; allowed: <what>``. What is allowed is read from the
schema itself, so that the line never says anything else than the check does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shardwright.errors import InputError
from shardwright.files.replacing import write_text

Model = TypeVar("Model", bound=BaseModel)
Key = tuple[str | int, ...]
"""The way to one value of a file: mapping keys and list indices from the top."""

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
"""What every schema of a user file sets: no unknown keys, no silent conversion ("4" is not 4), frozen."""


def _whole(value: Any) -> int:
    if type(value) is not int:  # to Literal[1], true and 1.0 would be 1
        raise ValueError("not a whole number")
    return value


Version1 = Annotated[Literal[1], BeforeValidator(_whole)]
"""The ``version`` of a schema that has had no other."""


class FieldError(InputError):
    """A fault at ``key`` below the value being checked; for validators that know better than a schema what is wrong."""

    def __init__(self, key: Key, found: str, allowed: str) -> None:
        self.key = key
        self.rest = f"found {found}; allowed: {allowed}"
        super().__init__(f"{dotted(key)}: {self.rest}" if key else self.rest)


def dotted(key: Key) -> str:
    """``("arena", "float32", 1)`` → ``arena.float32[1]``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


# Reading


def read_yaml(path: str | os.PathLike[str], schema: type[Model]) -> Model:
    """The file at ``path`` as a checked ``schema``.

    Plain YAML only: no tags, no duplicate keys, no value read as something else than it looks (``no`` is a word, 1e-3 a
    number, 010 is ten). Validators find the file's directory as ``info.context["directory"]``, an absolute Path.

    Raises InputError, one line, for the first fault in file order, with the number of further ones.
    """
    where = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(_one_line(f"{where}: found no such file; allowed: the path of a YAML file")) from None
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise InputError(_one_line(f"{where}: found no way in ({found.lower()}); allowed: a YAML file")) from None
    except UnicodeDecodeError as error:
        raise InputError(
            _one_line(f"{where}: found bytes that are not UTF-8 ({error.reason}); allowed: UTF-8")
        ) from None
    data, lines = _parse(where, text)
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
        raise InputError(_report(error, data, schema, where, lines or {})) from None


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


def _parse(where: str, text: str) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    """Plain data, and (first line, last line) of every key."""
    lines: dict[Key, tuple[int, int]] = {}

    def fault(key: Key, node: yaml.Node, found: str, allowed: str) -> InputError:
        name = f"{dotted(key)} " if key else ""
        return InputError(
            _one_line(f"{where}: {name}(line {node.start_mark.line + 1}): found {found}; allowed: {allowed}")
        )

    def scalar(key: Key, node: yaml.ScalarNode) -> Any:
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
            found = f"{len(word)} digits" if tag == "int" and len(word) > 80 else f"{_short(word)} tagged as {tag}"
            raise fault(key, node, found, "plain values of a usual size") from None
        raise fault(key, node, f"the tag {_short(node.tag)}", "plain YAML without tags")

    def value(key: Key, node: yaml.Node, open_nodes: tuple[int, ...]) -> Any:
        if id(node) in open_nodes:
            raise fault(key, node, "an alias of a value that contains it", "values that end")
        inside = (*open_nodes, id(node))
        if isinstance(node, yaml.ScalarNode):
            return scalar(key, node)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise fault(key, node, f"the tag {_short(node.tag)}", "plain YAML without tags")
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, child in enumerate(node.value):
                lines[(*key, index)] = _span(child, child)
                items.append(value((*key, index), child, inside))
            return items
        data: dict[str, Any] = {}
        for name_node, child in node.value:
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != _TAG + "str":
                shown = name_node.value if isinstance(name_node, yaml.ScalarNode) else "a list or mapping"
                raise fault(
                    key, name_node, f"the key {shown}", "keys that are text (in quotes where they look otherwise)"
                )
            name: str = name_node.value
            here = (*key, name)
            if name in data:
                raise fault(here, name_node, f"the key a second time (first on line {lines[here][0]})", "each key once")
            lines[here] = _span(name_node, child)
            data[name] = value(here, child, inside)
        return data

    try:
        root = yaml.compose(text, Loader=_Loader)
        found = "an empty file" if root is None else None
        data = None if root is None else value((), root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"(line {mark.line + 1}): " if mark else ""
        problem = (error.problem or error.context or "a fault").removeprefix("found ").removeprefix("but found ")
        allowed = "one YAML document of keys and values (indent with spaces, quote words that hold : # { [ * &)"
        raise InputError(_one_line(f"{where}: {at}found {problem}; allowed: {allowed}")) from None
    except yaml.YAMLError as error:  # characters that no YAML file may hold
        raise InputError(_one_line(f"{where}: found {str(error).splitlines()[0]}; allowed: printable text")) from None
    except RecursionError:
        raise InputError(_one_line(f"{where}: found hundreds of nested values; allowed: a few")) from None
    if not isinstance(data, dict):
        raise InputError(_one_line(f"{where}: found {found or found_text(data)}; allowed: a mapping of keys to values"))
    return data, lines


def _span(first: yaml.Node, last: yaml.Node) -> tuple[int, int]:
    end = last.end_mark
    return first.start_mark.line + 1, max(first.start_mark.line + 1, end.line + (1 if end.column else 0))


# One line out of a schema's complaints


class _Fault(NamedTuple):
    order: tuple[float, bool]
    key: Key
    text: str


def _report(
    error: ValidationError, data: Any, schema: type[BaseModel], where: str, lines: Mapping[Key, tuple[int, int]]
) -> str:
    root = schema.model_json_schema()
    faults: dict[Key, _Fault] = {}
    for details in error.errors(include_url=False):
        key, text = _fault(details, data, root)
        missing = details["type"] == "missing"
        if not missing and key in lines:
            order: float = lines[key][0]
        else:  # a missing key comes after everything that its parent holds
            parent = next((key[:end] for end in range(len(key) - 1, 0, -1) if key[:end] in lines), ())
            order = lines[parent][1] if parent else float("inf")
        faults.setdefault(key, _Fault((order, missing), key, text))
    # Where a value may be of two kinds, both complain: the deeper complaint is the one that understood the value.
    kept = [f for f in faults.values() if not any(k[: len(f.key)] == f.key and k != f.key for k in faults)]
    first, *more = sorted(kept, key=lambda fault: fault.order)
    line = next((lines[first.key[:end]][0] for end in range(len(first.key), 0, -1) if first.key[:end] in lines), None)
    at = dotted(first.key) + (f" (line {line})" if line else "")
    return _one_line(f"{where}: {at + ': ' if at else ''}{first.text}" + (f" (and {len(more)} more)" if more else ""))


def _fault(details: Any, data: Any, root: dict[str, Any]) -> tuple[Key, str]:
    kind, loc, value = details["type"], details["loc"], details["input"]
    if kind == "missing":
        key = (*_existing(loc[:-1], data), loc[-1])
        return key, f"found nothing; allowed: {allowed_text(_schema_at(root, key), root)}"
    key = _existing(loc, data)
    if kind == "extra_forbidden":
        known = _known_keys(_schema_at(root, key[:-1]), root)
        close = difflib.get_close_matches(str(key[-1]), known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return key, f"found an unknown key{hint}; allowed: {', '.join(known)}"
    problem = details.get("ctx", {}).get("error")
    if isinstance(problem, FieldError):
        return (*key, *problem.key), problem.rest
    if isinstance(problem, InputError) and "; allowed: " in str(problem):  # "layout.x: found …; allowed: …"
        name, _, rest = str(problem).partition(": ")
        return (*key, *name.split(".")[1:]), rest
    return key, f"found {found_text(value)}; allowed: {allowed_text(_schema_at(root, key), root)}"


def _existing(loc: tuple[str | int, ...], data: Any) -> Key:
    """The part of a complaint's place that is in the data (pydantic adds the names of union members)."""
    key: list[str | int] = []
    for part in loc:
        if isinstance(data, BaseModel):
            data = dict(data)
        known: Any = data if isinstance(data, Mapping) else range(len(data)) if isinstance(data, (list, tuple)) else ()
        if part in known:
            data = data[part]
            key.append(part)
    return tuple(key)


def resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def _children(schema: dict[str, Any], root: dict[str, Any], part: str | int) -> Iterator[dict[str, Any]]:
    schema = resolve(schema, root)
    for option in schema.get("anyOf", ()):
        yield from _children(option, root, part)
    if isinstance(part, int):
        prefix = schema.get("prefixItems", [])
        if part < len(prefix):
            yield prefix[part]
        elif isinstance(schema.get("items"), dict):
            yield schema["items"]
    elif part in schema.get("properties", {}):
        yield schema["properties"][part]
    elif isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]


def _known_keys(schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    schema = resolve(schema, root)
    return [
        *schema.get("properties", {}),
        *(k for option in schema.get("anyOf", ()) for k in _known_keys(option, root)),
    ]


def _schema_at(root: dict[str, Any], key: Key) -> dict[str, Any]:
    schema = root
    for part in key:
        schema = next(_children(schema, root, part), {})
    return schema


def allowed_text(schema: dict[str, Any], root: dict[str, Any], inner: bool = False) -> str:
    """What a JSON schema allows, in words; ``inner``: as a part of a longer sentence."""
    if "x-allowed" in schema:
        return str(schema["x-allowed"])
    schema = resolve(schema, root)
    if "x-allowed" in schema:
        return str(schema["x-allowed"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ("one of " if inner and len(schema["enum"]) > 1 else "") + ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return ", or ".join(allowed_text(option, root, True) for option in schema["anyOf"])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _bounds(schema)
        case "number":
            return "a number" + _bounds(schema)
        case "string":
            return "text that is not empty" if schema.get("minLength") else "text"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array" if "prefixItems" in schema:
            return "a list of: " + ", ".join(allowed_text(item, root, True) for item in schema["prefixItems"])
        case "array":
            least = f" of at least {schema['minItems']}" if schema.get("minItems") else ""
            return f"a list{least}, each item {allowed_text(schema.get('items', {}), root, True)}"
        case "object" if "properties" in schema:
            return f"a mapping with the keys {', '.join(schema['properties'])}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            least = f" of at least {schema['minProperties']} key" if schema.get("minProperties") else ""
            return f"a mapping{least}, each value {allowed_text(schema['additionalProperties'], root, True)}"
        case "object":
            return "a mapping"
    return "what its schema says"


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    parts = [f"{word} {schema[name]:g}" for name, word in words.items() if name in schema]
    return " " + " and ".join(parts) if parts else ""


def found_text(value: Any) -> str:
    """A value as a user would recognise it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (Mapping, BaseModel)):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return "an empty list" if not value else f"a list of {len(value)}"
    return _short(value)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:76] + "..." + text[-1]


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


# Writing


def write_yaml(path: str | os.PathLike[str], data: Mapping[str, Any], header_comment: str) -> None:
    """Writes ``data`` in its own order under ``header_comment``, whole or not at all.

    Raises InputError where the directory cannot be written.
    """
    comment = "".join(f"# {line}\n" for line in header_comment.splitlines())
    body = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    write_text(path, comment + body)


# Sizes

UNITS: dict[str, int] = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Bytes of each unit that sizes are written in."""

SIZES = "whole bytes, or a number with B, KiB, MiB, GiB or TiB, such as 72GiB"


SizeText = Annotated[str, Field(pattern=rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(UNITS)})?\s*$")]
"""A size as files may hold it, for their schemas."""


def parse_bytes(size: str | int, key: str = "size") -> int:
    """Bytes of ``"72GiB"``, ``"1.5 MiB"``, ``"512"`` or 512; ``key`` is the name that an error bears.

    Decimal units are refused, since 72GB is read as 72·10^9 by some and as 72·2^30 by others.
    """

    def fault(found: str, allowed: str = SIZES) -> InputError:
        return InputError(f"{key}: found {found}; allowed: {allowed}")

    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise fault(found_text(size))
    if isinstance(size, int):
        if size < 0:
            raise fault(str(size))
        return size
    match = re.fullmatch(r"([0-9]{1,30})(\.[0-9]{1,30})?\s*([A-Za-z]*)", size.strip(), re.ASCII)
    if not match:
        raise fault(_short(size))
    whole, fraction, unit = str(match[1]), str(match[2] or ""), str(match[3] or "B")
    if unit not in UNITS:
        meant = {name.lower(): name for name in UNITS} | {name.lower().replace("i", ""): name for name in UNITS}
        meant |= {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB"}
        if unit.lower() not in meant:
            raise fault(_short(size))
        name = meant[unit.lower()]
        power = UNITS[name].bit_length() - 1
        raise fault(_short(size), f"{whole}{fraction}{name}, where 1 {name} = 2^{power} bytes ({SIZES})")
    denominator: int = 10 ** len(fraction[1:])
    numerator = int(whole + fraction[1:]) * UNITS[unit]
    if numerator % denominator:
        if unit == "B":
            raise fault(_short(size))
        return round(numerator / denominator)
    return numerator // denominator


def format_bytes(count: int) -> str:
    """``512 B`` exactly, larger sizes with two decimals: ``1.50 GiB`` (1 GiB = 2^30 bytes)."""
    sign, size = ("-" if count < 0 else ""), abs(count)
    if size < 1024:
        return f"{sign}{size} B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if name == "TiB" or round(size / UNITS[name], 2) < 1024:
            break
    return f"{sign}{size / UNITS[name]:.2f} {name}"
