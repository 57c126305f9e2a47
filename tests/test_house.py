"""The house: rooms in layers, imports that point downward, files and functions of a size that one can read."""

from __future__ import annotations

import ast
from functools import cache
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
LINES_OF_A_ROOM, FILES_OF_A_ROOM, LINES_OF_A_FUNCTION, LINES_OF_A_FILE = 2000, 14, 60, 350
EXCEPTIONS: dict[str, str] = {}
"""What may be larger → why; five at most. Keys: a room, a file, or file:function."""


@cache
def trees() -> dict[str, ast.Module]:
    """Module name inside the package → its syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__") or "__init__"] = ast.parse(path.read_text())
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, for type checking too, inside functions too."""
    return {name: {module_of(target) for target in targets(tree)} - {"", name} for name, tree in trees().items()}


def targets(tree: ast.Module) -> list[str]:
    """Every dotted name that a file imports, without the package's own."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "found a relative import; allowed: absolute ones, which tell their room"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name.removeprefix("shardwright.") for name in found if name.startswith("shardwright.")]


def module_of(target: str) -> str:
    """The file that a dotted name is imported from."""
    while target and target not in trees():
        target = target.rpartition(".")[0]
    return target


def room(name: str) -> str:
    return name.split(".")[0]


def test_every_room_has_a_layer():
    assert {room(name) for name in trees()} - {"__init__"} == set(LAYER)


def test_imports_point_downward():
    upward = [
        f"{name} (layer {LAYER[room(name)]}) imports {target} (layer {LAYER[room(target)]})"
        for name, found in imports().items()
        for target in found
        if name != "__init__" and LAYER[room(target)] > LAYER[room(name)]
    ]
    assert not upward, "\n".join(upward)


def test_rooms_side_by_side_do_not_know_each_other():
    beside = [
        f"{name} imports {target}"
        for name, found in imports().items()
        for target in found
        if name != "__init__" and room(target) != room(name) and LAYER[room(target)] == LAYER[room(name)]
    ]
    assert not beside, "\n".join(beside)


def test_there_are_no_circles():
    state: dict[str, str] = {}

    def visit(name: str, path: list[str]) -> None:
        if state.get(name) == "done":
            return
        assert state.get(name) != "open", " → ".join([*path[path.index(name) :], name])
        state[name] = "open"
        for target in sorted(imports()[name]):
            # a room's face imports its own parts; the parts name each other, not the face
            visit(target, [*path, name])
        state[name] = "done"

    for name in imports():
        visit(name, [])


def sizes() -> dict[str, tuple[int, int]]:
    """What has a size → (that size, the largest allowed)."""
    found, lines, files = {}, {}, {}
    for path in sorted(ROOT.rglob("*.py")):
        own, place = len(path.read_text().splitlines()), path.relative_to(ROOT)
        folder = str(place.parent)
        lines[folder], files[folder] = lines.get(folder, 0) + own, files.get(folder, 0) + 1
        found[str(place)] = own, LINES_OF_A_FILE
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                found[f"{place}:{node.name}"] = node.end_lineno - node.lineno + 1, LINES_OF_A_FUNCTION
    found |= {f"{folder}/": (count, LINES_OF_A_ROOM) for folder, count in lines.items()}
    return found | {f"{folder}/*": (count, FILES_OF_A_ROOM) for folder, count in files.items()}


def test_rooms_files_and_functions_can_be_read_in_one_sitting():
    large = {name: f"{size} > {most}" for name, (size, most) in sizes().items() if size > most}
    assert {name: why for name, why in large.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(large), "an exception that is none any more"
    assert len(EXCEPTIONS) <= 5


def test_no_room_bears_the_name_of_a_public_function():
    assert not set(LAYER) & set(shardwright.__all__)


def decides(node: ast.AST) -> bool:
    """Whether something compares ``….overlap``, branches on it, or looks it up in a table."""

    def is_overlap(inner: ast.AST) -> bool:
        return isinstance(inner, ast.Attribute) and inner.attr == "overlap"

    if isinstance(node, ast.Compare):
        return any(map(is_overlap, [node.left, *node.comparators]))
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return any(map(is_overlap, ast.walk(node.test)))
    if isinstance(node, ast.Match):
        return is_overlap(node.subject)
    return isinstance(node, ast.Subscript) and any(map(is_overlap, ast.walk(node.slice)))


def test_what_a_mode_comes_to_is_decided_in_one_function():
    deciding = {
        f"{name}:{function.name}"
        for name, tree in trees().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and any(map(decides, ast.walk(function)))
    }
    assert deciding == {"spec.resolved:resolve"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("if layout.overlap == 'ring': pass", True),
        ("MODES[layout.overlap]", True),
        ("x = 1 if mode.overlap else 2", True),
        ("GridLayout(overlap=mode.overlap)", False),
        ("name = f'{mode.overlap}'", False),
    ],
)
def test_a_decision_is_recognised(line: str, found: bool):
    assert any(map(decides, ast.walk(ast.parse(line)))) == found
