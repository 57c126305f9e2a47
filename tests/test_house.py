"""The house: a file imports only from its own layer and those below, without circles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardwright

ROOT = Path(shardwright.__file__).parent
LAYERS = [  # bottom to top; rooms on one line are side by side
    ["errors"], ["files"], ["spec"], ["families", "trace", "formulas"], ["comm"], ["runtime"], ["values"], ["params"],
    ["unsharding", "reshard"], ["overlap"], ["linear"], ["layers"], ["step"], ["checkpoint"], ["models"], ["simulate"],
    ["stretching", "profile"], ["space"], ["solving"], ["pricing"], ["certificate"], ["search"], ["train"], ["report"],
    ["demo"], ["cli"], ["__main__"],
]  # fmt: skip
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def modules():
    """Module name (inside the package) → what it imports of the package at run time."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__") or "__init__"
        found[name] = imports(ast.parse(path.read_text()))
    return found


def imports(tree):
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in ast.walk(node):
                child.skip = True
        if getattr(node, "skip", False):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwright":
            inner = ".".join(node.module.split(".")[1:])
            names += [f"{inner}.{alias.name}".strip(".") for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [
                alias.name.removeprefix("shardwright.") for alias in node.names if alias.name.startswith("shardwright.")
            ]
    return names


def layer(name):
    return LAYER[name.split(".")[0]]


def test_every_room_has_a_layer():
    assert {name.split(".")[0] for name in modules()} - {"__init__"} <= set(LAYER)


@pytest.mark.parametrize("name", [name for name in modules() if name != "__init__"])
def test_imports_point_downward(name):
    for target in modules()[name]:
        if target.split(".")[0] in LAYER:
            assert layer(target) <= layer(name), (
                f"{name} (layer {layer(name)}) imports {target} (layer {layer(target)})"
            )


def test_there_are_no_circles():
    known = modules()

    def resolve(target):
        while target and target not in known:
            target = target.rpartition(".")[0]
        return target

    edges = {name: {resolve(t) for t in targets} - {"", name} for name, targets in known.items()}
    state = {}

    def visit(name, path):
        if state.get(name) == "done":
            return
        assert state.get(name) != "open", " → ".join([*path, name])
        state[name] = "open"
        for target in sorted(edges[name]):
            # a package's face imports its own parts; the parts name each other, not the face
            visit(target, [*path, name])
        state[name] = "done"

    for name in edges:
        visit(name, [])
