"""No run of six statements stands twice in the package: what two places need has one name that both use."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import shardwright

ROOT = Path(shardwright.__file__).parent
RUN = 6
NESTED = ("body", "handlers", "orelse", "finalbody", "cases")
"""The fields of a statement that hold statements, in the order in which they are written."""


def flattened(node):
    """(line, statement as text) in the order of the file: a compound one as its head, then what it holds.

    Imports and docstrings are left out.
    """
    for field in NESTED:
        for inner in getattr(node, field, ()):
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                continue
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                continue
            if isinstance(inner, ast.stmt):  # an except or a case is none
                head = {name: [] if name in NESTED else value for name, value in ast.iter_fields(inner)}
                yield inner.lineno, ast.dump(type(inner)(**head))
            yield from flattened(inner)


def repeated(sources):
    """Runs of statements that stand twice: [[place, place, ..], ..]; sources: name of a file → its text."""
    places = defaultdict(list)
    for name, text in sources.items():
        lines = list(flattened(ast.parse(text)))
        for start in range(len(lines) - RUN + 1):
            run = lines[start : start + RUN]
            places[tuple(statement for _, statement in run)].append(f"{name}:{run[0][0]}")
    return [found for found in places.values() if len(found) > 1]


def test_no_run_of_six_statements_stands_twice():
    assert repeated({str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}) == []


def test_runs_are_found_across_blocks_and_a_changed_name_ends_one():
    run = "a = 1\nif a:\n    b = 2\n    c = 3\ntry:\n    d = 4\nfinally:\n    e = 5\n"
    assert repeated({"x.py": run, "y.py": f'"""Doc."""\nimport os\n\n\ndef f():\n{indented(run)}'})
    assert not repeated({"x.py": run, "y.py": run.replace("d = 4", "other = 4").replace("e = 5", "other = 5")})
    assert not repeated({"x.py": "import a\n" * RUN, "y.py": "import a\n" * RUN})


def indented(text):
    return "".join(f"    {line}\n" for line in text.splitlines())
