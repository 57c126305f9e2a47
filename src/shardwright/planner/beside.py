"""Beside the best: the fastest candidate's mix in more chunks, and the structures that differ from it in one thing.

A structure's variants (space.py) are many, and most of them change little. So they are not looked at before the plain
structures were; but those beside the best one are, in the modes of its mix only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from shardwright.planner.candidate import Candidate, all_priced
from shardwright.planner.problem import Problem
from shardwright.planner.space import CHUNKED, Mode


def improved(
    problem: Problem, best: Candidate, candidates: Sequence[Candidate], pool: Executor, tell: Callable[[str], None]
) -> list[Candidate]:
    """The best one with its mix in more chunks, and its neighbours in that mix's modes, the fastest first.

    Neighbours: one thing else, of the order of the axes, the grids, and the units in flight. Fewer of these free memory
    only, so they are left out where the fastest mix of all fits.
    """
    assert best.mix is not None
    chosen = [choice for choice, count in zip(best.choices, best.mix.counts, strict=True) if count]
    used = list(dict.fromkeys(mode for attention, mlp, _ in chosen for mode in (attention, mlp)))
    words = list(dict.fromkeys(word for _, _, word in chosen))
    whatever = best.within(2**63)
    assert whatever is not None
    enough = whatever.seconds == best.mix.seconds
    beside = [
        each
        for each in candidates
        if each.structure.usual == best.structure.usual
        and each.structure.differs(best.structure) == 1
        and not (enough and each.structure.in_flight < best.structure.in_flight)
    ]
    tell(f"{best.structure.name}: more chunks, and what is beside it")
    chunked = (best, [mode for each in used for mode in (each, *_more_chunks(each))])
    found = all_priced(problem, [chunked, *((each, used) for each in beside)], pool, words)
    return sorted((each for each in found if each.frame is not None), key=lambda each: each.seconds)


def _more_chunks(mode: Mode) -> list[Mode]:
    return [each for each in CHUNKED if (each.overlap, each.save_x) == (mode.overlap, mode.save_x)]
