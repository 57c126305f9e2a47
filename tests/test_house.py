"""The house: a file imports only from its own floor and those below, without circles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardwright

ROOT = Path(shardwright.__file__).parent
FLOORS = {
    "cli": 9, "report": 9, "demo": 9, "__main__": 9,
    "train": 8,
    "planner": 7,
    "step": 6, "_rehearse": 6, "_remarks": 6,
    "models": 5, "_structure": 5, "_parallelize": 5, "_forward": 5, "_fallback": 5,
    "linear": 4, "layers": 4,
    "params": 3,
    "comm": 2,
    "cost": 1, "trace": 1,
    "layout": 0, "sharding": 0, "site": 0, "edge": 0, "mesh": 0, "_plan": 0, "_plan_fields": 0, "cluster": 0,
    "_config_file": 0, "_patterns": 0, "_files": 0, "_errors": 0, "_replacing": 0, "_launched": 0,
}  # fmt: skip


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


def floor(name):
    return FLOORS[name.split(".")[0]]


def test_every_file_has_a_floor():
    assert {name.split(".")[0] for name in modules()} - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize("name", [name for name in modules() if name != "__init__"])
def test_imports_point_downward(name):
    for target in modules()[name]:
        if target.split(".")[0] in FLOORS:
            assert floor(target) <= floor(name), (
                f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})"
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
