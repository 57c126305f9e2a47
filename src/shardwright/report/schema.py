"""What the files of users may hold: their JSON schemas, and the page of documentation that is made from those."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from shardwright.files.messages import allowed_text, resolve
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan
from shardwright.train.run_file import Run

FILES: dict[str, type[BaseModel]] = {"plan": Plan, "cluster": Cluster, "run": Run}
"""Kinds of files → their schemas."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"

UNITS = (
    "bytes per second", "floating-point operations per second", "bytes", "seconds", "tokens per sequence", "tokens",
    "sequences", "micro-batches", "optimizer steps", "batches", "checkpoints", "parameter groups", "ranks", "hosts",
    "devices", "without a unit",
)  # fmt: skip
"""Units of numbers. That of a field is the one that its description names first."""

INTRODUCTION = """\
# The files that you write

Plan, cluster and run files are YAML: plain keys and values, each key once, no tags. A word is read as what it looks
like (`no` is a word, `1e-3` a number); sizes are bytes, or a number with B, KiB, MiB, GiB or TiB where the table says
so (1 GiB = 2^30 bytes). A key that is not in the table is refused. Every fault is one line that names the file, the key
and its line, what was found and what is allowed; commands then exit with 2.

`make demo DEMO_ARGS="--output demo-files"` writes a plan and a run file to start from. `shardwright schema plan`,
`schema cluster` and `schema run` print the JSON schemas, which editors check and complete against. This page is made
from the same schemas by `shardwright schema --markdown`.

In a key, `NAME` stands for a name or pattern of your own. A default of — means that the key may be left out.
"""


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the plan, cluster or run file."""
    return {"$schema": DIALECT} | FILES[kind].model_json_schema()


class Field(NamedTuple):
    """One key of a file.

    key: dotted, ``NAME`` where the user chooses the key; schema: of its value; required: whether it must be given
    (where what it belongs to is).
    """

    key: str
    schema: dict[str, Any]
    required: bool


def file_fields(root: dict[str, Any]) -> Iterator[Field]:
    """Every field of a JSON schema, in its order, each before what it holds."""
    return _fields(root, root, "")


def _fields(schema: dict[str, Any], root: dict[str, Any], above: str) -> Iterator[Field]:
    for name, value in schema.get("properties", {}).items():
        yield Field(above + name, value, name in schema.get("required", ()))
        for below, inner in _mappings(value, root, above + name):
            yield from _fields(inner, root, below + ".")


def _mappings(schema: dict[str, Any], root: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, schema) of the mappings with known keys that a value may be or, under keys of the user, may hold."""
    schema = resolve(schema, root)
    for option in schema.get("anyOf", ()):
        yield from _mappings(option, root, key)
    if "properties" in schema:
        yield key, schema
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from _mappings(schema["additionalProperties"], root, key + ".NAME")


def type_text(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """The type of a value in a few words."""
    schema = resolve(schema, root)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_text(option, root) for option in schema["anyOf"]))
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
    }
    kind = schema.get("type", "")
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        return "list of " + " and ".join(dict.fromkeys(type_text(item, root) for item in items))
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"mapping of text to {type_text(values, root)}" if isinstance(values, dict) else "mapping"
    return words.get(kind, "any")


def is_number(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value is, or holds under names of the user or in a list, a number."""
    return "number" in type_text(schema, root)


def unit(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """The unit of a number, ``none`` for one without; empty where the value is no number, or only names something."""
    if not is_number(schema, root):
        return ""
    found = re.search("|".join(rf"\b{re.escape(word)}\b" for word in UNITS), schema.get("description", ""))
    return found[0].replace("without a unit", "none") if found else ""


def markdown() -> str:
    """The page on the files: every field with type, unit, default, what is allowed, and what it means."""
    parts = [INTRODUCTION]
    for kind, model in FILES.items():
        root = json_schema(kind)
        summary = " ".join((model.__doc__ or "").replace("``", "`").split())
        parts.append(f"## The {kind} file\n\n{summary}\n")
        rows = [_row(field, root) for field in file_fields(root)]
        head = ["| key | type | unit | default | allowed | meaning |", "|---|---|---|---|---|---|"]
        parts.append("\n".join(head + rows) + "\n")
    return "\n".join(parts)


def _row(field: Field, root: dict[str, Any]) -> str:
    schema = field.schema
    default = f"`{json.dumps(schema['default'])}`" if "default" in schema else "—"
    cells = [
        f"`{field.key}`",
        type_text(schema, root),
        unit(schema, root),
        "required" if field.required else default,
        allowed_text(schema, root),
        schema.get("description", ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
