"""A rank's place on the mesh, as formulas see it, and what it moves: the pure counterparts of comm/groups.py."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardwright.spec.mesh import chunk, nested_chunk


@dataclass(frozen=True)
class Move:
    """One logical collective, as ``trace.collectives`` logs it; size: bytes of the full tensor, sent: by this rank."""

    kind: str
    axes: tuple[str, ...]
    size: int
    sent: int


Moves = tuple[Move, ...]


@dataclass(frozen=True)
class Here:
    """A rank's place on the mesh."""

    sizes: Mapping[str, int]
    place: Mapping[str, int]

    def group(self, axes: Collection[str]) -> Group:
        """The ranks along ``axes``; its axes and its order are the mesh's (comm/groups.py)."""
        ordered = tuple(axis for axis in self.sizes if axis in axes)
        index = 0
        for axis in ordered:
            index = index * self.sizes[axis] + self.place[axis]
        return Group(ordered, tuple(self.sizes[axis] for axis in ordered), index)

    def cut(self, length: int, axes: Collection[str]) -> int:
        """What this rank holds of ``length``, cut axis after axis in mesh order (values/placement.py)."""
        for axis in self.sizes:
            if axis in axes:
                start, stop = chunk(length, self.sizes[axis], self.place[axis])
                length = stop - start
        return length


@dataclass(frozen=True)
class Group:
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """Ranks."""
        return math.prod(self.sizes)

    def joined(self) -> Group:
        """The same ranks as one axis."""
        return Group(self.axes, (self.size,), self.index)

    def copies(self, parts: int) -> Group:
        """Those of its ranks, one after the other, that hold the same one of ``parts``."""
        each = self.size // parts
        return Group(self.axes, (each,), self.index % each)

    def beside(self, other: Group, order: Iterable[str]) -> Group:
        """The ranks along this group and ``other``, whose axes are others; order: the mesh's."""
        axes = tuple(axis for axis in order if axis in self.axes + other.axes)
        return Group(axes, (*self.sizes, *other.sizes), self.index * other.size + other.index)

    def part(self, rows: int, ahead: int = 0) -> int:
        """The rows, of ``rows``, of this rank or of the one that many places ahead."""
        start, stop = nested_chunk(rows, self.sizes, (self.index + ahead) % self.size)
        return stop - start

    def gather(self, whole: int, own: int, following: int | None = None) -> Moves:
        """An all-gather of ``whole`` bytes, ``own`` of them from here; following: the next rank's part, in a ring."""
        sent = own * (self.size - 1) if following is None else whole - following
        return self._move("all_gather", whole, sent)

    def scatter(self, whole: int, own: int) -> Moves:
        """A reduce-scatter of ``whole`` bytes, ``own`` of them for here."""
        return self._move("reduce_scatter", whole, whole - own)

    def reduce(self, whole: int) -> Moves:
        """An all-reduce of ``whole`` bytes."""
        return self._move("all_reduce", whole, 2 * whole * (self.size - 1) // self.size)

    def _move(self, kind: str, size: int, sent: int) -> Moves:
        return (Move(kind, self.axes, size, sent),) if self.size > 1 else ()
