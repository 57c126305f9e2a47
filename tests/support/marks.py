"""Which parameters of a test make it slow: ``make test`` leaves those out, ``--slow`` (make test-all) takes them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_where(slow: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """The values, those marked slow of which ``slow`` is true; a tuple is one value for each of its arguments."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.slow] if slow(*row) else []) for row in rows]


def slow_at(places: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """The values, those at these places marked slow."""
    chosen, places = list(values), frozenset(places)
    rows = [value if isinstance(value, tuple) else (value,) for value in chosen]
    return [pytest.param(*row, marks=[pytest.mark.slow] if place in places else []) for place, row in enumerate(rows)]


def slow_in(names: Iterable[str], values: Iterable[str]) -> list[Any]:
    """The values, marked slow where ``names`` has them, each of which is one of the values."""
    values, names = list(values), list(names)
    unknown = [name for name in names if name not in values]
    assert not unknown, f"slow: found {unknown}; allowed: {values}"
    return slow_where(lambda value: value in names, values)
