"""Neighbours of the best candidate: the fastest candidate's assignment in more chunks, and the structures that differ
from it in one thing.

Step by step: from the fastest one that was found so far to what lies beside that.

A structure's variants (space.py) are many, and most of them change little. So they are not looked at before the plain
structures were; but the neighbours of the best one are, in the modes of its assignment only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from shardwright.search.candidate import Candidate, all_priced
from shardwright.space.problem import Problem
from shardwright.space.space import CHUNKED, Mode, Structure


def improved(
    problem: Problem,
    best: Candidate,
    candidates: Sequence[Candidate],
    pool: Executor,
    until: float,
    tell: Callable[[str], None],
) -> list[Candidate]:
    """The best one with its assignment in more chunks, and neighbours in that assignment's modes, the fastest first.

    Where a neighbour is faster, its own neighbours come next. Two chunks and one neighbour are looked at whatever the
    time, the others while there is time.
    """
    used, words = _chosen(best)
    tell(f"{best.structure.name}: more chunks")
    beside = [(each, used) for each in _neighbours(best, candidates)]
    found = all_priced(problem, [(best, used + _chunked(used, 2)), *beside[:1]], pool, words)
    if _chunked(used, 4) and time.monotonic() < until:
        found[0] = all_priced(problem, [(found[0], _chunked(used, 4))], pool, words)[0]
    while time.monotonic() < until:
        fastest = min(found, key=lambda each: each.seconds)
        seen = {each.structure for each in found}
        nearest = next((each for each in _neighbours(fastest, candidates) if each.structure not in seen), None)
        if nearest is None:
            break
        tell(f"{nearest.structure.name}: beside the best")
        used, words = _chosen(fastest)
        found += all_priced(problem, [(nearest, used)], pool, words)
    return sorted((each for each in found if each.fixed_cost is not None), key=lambda each: each.seconds)


def _chosen(candidate: Candidate) -> tuple[list[Mode], list[str]]:
    """The modes, and the words of recomputation, in the candidate's assignment."""
    assert candidate.assignment is not None
    chosen = [choice for choice, count in zip(candidate.choices, candidate.assignment.counts, strict=True) if count]
    used = list(dict.fromkeys(mode for attention, mlp, _ in chosen for mode in (attention, mlp)))
    return used, list(dict.fromkeys(word for _, _, word in chosen))


def _neighbours(best: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    """What differs from the best in one thing: units in flight, the order of the axes, the grids, then a bucket.

    Fewer units in flight free memory only, so they are left out where the fastest assignment of all fits.
    """
    assert best.assignment is not None
    mine, whatever = best.structure, best.within(2**63)
    enough = whatever is not None and whatever.seconds == best.assignment.seconds
    found = [
        each
        for each in candidates
        if each.structure.usual == mine.usual
        and each.structure.differs(mine) == 1
        and not (enough and each.structure.in_flight < mine.in_flight)
    ]
    return sorted(found, key=lambda each: _nearness(mine, each.structure))


def _nearness(mine: Structure, other: Structure) -> tuple[bool, int, bool, int]:
    of_axes = mine.feature_axes == other.feature_axes
    return mine.in_flight == other.in_flight, -other.in_flight, of_axes, abs(other.bins - mine.bins)


def _chunked(modes: Sequence[Mode], chunks: int) -> list[Mode]:
    """These modes in so many chunks, where there are such."""
    return [mode for mode in CHUNKED if replace(mode, chunks=0) in modes and mode.chunks == chunks]
