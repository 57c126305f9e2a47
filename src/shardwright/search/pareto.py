"""The curve of what memory buys: every assignment that no other beats in both seconds and bytes, of all structures
priced.

Walked down exactly: the fastest assignment of a structure within a memory limit, then within a limit below what that
one needs, until nothing fits. The curves of all structures together, less what is beaten, are the curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwright.search.candidate import Candidate, told
from shardwright.solving.solve import Assignment, Program

FINEST = 25
"""Steps between two points are at least this share (1/25) of the larger peak: what differs by less is one point."""


@dataclass(frozen=True)
class Point:
    """One assignment on the curve: peak (bytes by the model), seconds, the structure's name and what its blocks do."""

    peak: int
    seconds: float
    structure: str
    blocks: str


@dataclass(frozen=True)
class Knob:
    """From one point of the curve to the next leaner one: bytes given back, seconds lost, and what changes."""

    saved: int
    lost: float
    to: Point

    @property
    def gib_per_ms(self) -> float:
        """GiB (2^30 bytes) for each millisecond lost."""
        return self.saved / 2**30 / (self.lost * 1e3) if self.lost else float("inf")


def curve(candidates: Iterable[Candidate], memory: int | None = None, finest: int = FINEST) -> tuple[Point, ...]:
    """The curve, fastest first. memory: bytes that no point may exceed; None: no limit. finest: as FINEST."""
    points = sorted(
        (point for candidate in candidates for point in _walk(candidate, memory, finest)),
        key=lambda each: (each.seconds, each.peak),
    )
    kept: list[Point] = []
    for point in points:
        if not kept or point.peak < kept[-1].peak:
            kept.append(point)
    return tuple(kept)


def knobs(points: Sequence[Point]) -> tuple[Knob, ...]:
    """What each step down the curve gives, most GiB per millisecond first."""
    steps = [Knob(above.peak - below.peak, below.seconds - above.seconds, below) for above, below in pairwise(points)]
    return tuple(sorted(steps, key=lambda knob: -knob.gib_per_ms))


def _walk(candidate: Candidate, memory: int | None, finest: int) -> Iterable[Point]:
    if candidate.fixed_cost is None:
        return
    program = Program(candidate.fixed_cost, candidate.options, candidate.units)
    least, largest = program.leanest(), memory
    memory = 2**60 if memory is None else memory
    while least.peak <= memory:
        assignment = program.fastest(memory)
        if assignment is None:
            return
        yield _point(candidate, assignment)
        memory = assignment.peak - max(1, assignment.peak // finest)
    if largest is None or least.peak <= largest:
        yield _point(candidate, program.fastest(least.peak) or least)


def _point(candidate: Candidate, assignment: Assignment) -> Point:
    return Point(assignment.peak, assignment.seconds, candidate.structure.name, told(candidate, assignment))
