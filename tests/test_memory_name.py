"""The bytes that a device may hold have one name, ``memory``, from the command to the solver."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright

ROOT = Path(shardwright.__file__).parent
OTHER_NAMES = {"budget", "limit", "room"}
ROOMS = ("space", "search", "solving", "pricing", "certificate")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))] + [
    ROOT / name for name in ("cli/planning.py", "report/planning.py", "report/unsplit.py")
]
STOPS = [  # file, class or "", function or field, in the order in which the number passes
    ("cli/planning.py", "", "plan"),
    ("search/plan.py", "", "plan"),
    ("space/request.py", "", "asked"),
    ("space/request.py", "Asked", "memory"),
    ("space/problem.py", "Problem", "memory"),
    ("pricing/formula_bounds.py", "", "formula_bound"),
    ("pricing/formula_bounds.py", "FormulaBound", "above"),
    ("search/candidate.py", "Candidate", "within"),
    ("search/pareto.py", "", "curve"),
    ("solving/solve.py", "", "fastest"),
    ("solving/solve.py", "Program", "fastest"),
    ("solving/solve.py", "Program", "within"),
]


def names(tree: ast.AST) -> Iterator[str]:
    """Every parameter, variable, attribute, keyword and definition."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def other_names(source: str) -> set[str]:
    """Names of which a word, between underscores, is another word for memory."""
    return {name for name in names(ast.parse(source)) if OTHER_NAMES & set(name.lower().split("_"))}


def test_other_names_are_found():
    source = "def f(budget): limit = x.room; return g(max_budget=limit)"
    assert other_names(source) == {"budget", "limit", "room", "max_budget"}
    assert not other_names("def f(memory, bedrooms, limited): 'the limit'; return memory")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_nothing_of_the_search_has_another_name_for_memory(path):
    assert not other_names(path.read_text())


@pytest.mark.parametrize(("file", "owner", "name"), STOPS)
def test_each_stop_takes_memory(file, owner, name):
    body = ast.parse((ROOT / file).read_text()).body
    if owner:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    if name == "memory":
        fields = {
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert name in fields
    else:
        taken = next(node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
        assert "memory" in {each.arg for each in (*taken.args, *taken.kwonlyargs)}
