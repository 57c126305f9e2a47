"""Whether ranks issue the same collectives: the members of a group wait for each other, so their order must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from shardwright.comm.divergence import DivergenceError, disagreement, told
from shardwright.simulate.rank_classes import RankClass
from shardwright.spec.mesh import ranks_along
from shardwright.trace import Collective, Trace

ByAxes = Mapping[tuple[str, ...], Sequence[Collective]]
"""Axes of more than one rank → the collectives over them, in their order."""


def agree_by_class(said: Mapping[int, ByAxes], classes: Sequence[RankClass], mesh: Mapping[str, int]) -> None:
    """Raises DivergenceError unless the members of every group issue the same collectives over it, in the same order.

    said: rank → its collectives; one rank speaks for each class. Every two classes that meet in a group are compared
    once.
    """
    speaker = {rank: each.representative for each in classes for rank in each.ranks}
    empty: list[Collective] = []
    for axes in {axes for mine in said.values() for axes in mine}:
        for pair in _meetings(axes, classes, speaker, mesh):
            _agree(pair[0], said[pair[0]].get(axes, empty), pair[1], said[pair[1]].get(axes, empty))


def by_axes(trace: Trace, mesh: Mapping[str, int]) -> ByAxes:
    """The collectives of a trace, by the axes of more than one rank that they go over."""
    found: dict[tuple[str, ...], list[Collective]] = {}
    for event in trace.collectives:
        found.setdefault(tuple(axis for axis in event.axes if mesh[axis] > 1), []).append(event)
    return found


def _meetings(
    axes: Sequence[str], classes: Sequence[RankClass], speaker: Mapping[int, int], mesh: Mapping[str, int]
) -> set[tuple[int, int]]:
    """Pairs of representatives whose classes have members in one group along ``axes``."""
    if len(classes) == 1:
        return set()
    pairs, done = set[tuple[int, int]](), set[int]()
    for rank in speaker:
        if rank not in done:
            group = ranks_along(rank, axes, mesh)
            done.update(group)
            first, *others = sorted({speaker[member] for member in group})
            pairs |= {(first, other) for other in others}
    return pairs


def _agree(one: int, ours: Sequence[Collective], other: int, theirs: Sequence[Collective]) -> None:
    for index, (mine, its) in enumerate(zip_longest(ours, theirs)):
        if mine is None or its is None or _essence(mine) != _essence(its):
            raise DivergenceError(disagreement(index, (mine or its).ranks, [(one, _told(mine)), (other, _told(its))]))


def _essence(event: Collective) -> tuple[str, str, tuple[str, ...], int, int]:
    return event.kind, event.module, event.axes, event.size, event.step


def _told(event: Collective | None) -> str:
    if event is None:
        return "issues none"
    where = f"{event.module or 'no module'}, step {event.step}, {event.phase}"
    return f"issues {told(event.kind, event.axes, event.size, where)}"
