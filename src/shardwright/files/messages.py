"""What is wrong with a file, in one line: ``<file>: <key> (line N): found <what>; allowed: <what>``.

What is allowed is read from the schema itself, so that the line never says anything else than the check does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from shardwright.errors import InputError

Key = tuple[str | int, ...]
"""The way to one value of a file: mapping keys and list indices from the top."""


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


class _Fault(NamedTuple):
    order: tuple[float, bool]
    key: Key
    text: str


def report(
    error: ValidationError, data: Any, schema: type[BaseModel], where: str, lines: Mapping[Key, tuple[int, int]]
) -> str:
    """The line for the first of a schema's complaints in file order, with the number of further ones."""
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
    return one_line(f"{where}: {at + ': ' if at else ''}{first.text}" + (f" (and {len(more)} more)" if more else ""))


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
    """What a schema's references lead to."""
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
    return short(value)


def short(value: Any) -> str:
    """A value in 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:76] + "..." + text[-1]


def one_line(text: str) -> str:
    """``text`` without line breaks."""
    return " ".join(text.splitlines())
