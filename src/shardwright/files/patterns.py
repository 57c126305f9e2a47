"""Patterns of a plan against the names that they are for: the first that matches a name decides of it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from shardwright.errors import InputError
from shardwright.files.messages import dotted

Choice = TypeVar("Choice")


def decided(patterns: Collection[str], names: Collection[str]) -> dict[str, list[str]]:
    """Pattern → the names that it decides, in order: those that it is the first to match."""
    left, found = list(names), dict[str, list[str]]()
    for pattern in patterns:
        found[pattern] = [name for name in left if fnmatchcase(name, pattern)]
        left = [name for name in left if not fnmatchcase(name, pattern)]
    return found


def effective(patterns: Mapping[str, Choice], names: Collection[str]) -> dict[str, Choice]:
    """Those of the patterns that decide at least one of the names."""
    mine = decided(patterns, names)
    return {pattern: choice for pattern, choice in patterns.items() if mine[pattern]}


def check_patterns(field: str, patterns: Collection[str], names: Collection[str], kind: str) -> None:
    """Raises InputError for the first pattern that decides no name.

    field: of the plan. kind: what the names are of, such as ``block``, for the message.
    """
    for pattern, mine in decided(patterns, names).items():
        if mine:
            continue
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if matched:
            earlier = next(each for each in patterns if fnmatchcase(matched[0], each))
            found = f"a pattern that decides no {kind}, since {earlier!r} before it matches {matched[0]}"
            allowed = "an order in which each pattern is the first to match some name"
        else:
            nearest = max(names, key=lambda name: difflib.SequenceMatcher(None, pattern, name).ratio())
            found = f"a pattern that matches no {kind}"
            allowed = f"a pattern of their names, such as {nearest}"
        raise InputError(f"{dotted((field, pattern))}: found {found}; allowed: {allowed}")
