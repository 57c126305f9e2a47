"""Segments of a trace: which block of the model each event belongs to.

In a forward or backward pass an event belongs to the block whose operator ran last. The parameters at the start, the
moments that step 1 makes, and the gradients that a step releases are listed in the order of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from shardwright.trace import Alloc, Free, Op, Trace


class NotPeriodic(RuntimeError):
    """Neighbouring units of blocks do not do the same; the message names the first event that differs."""


class Names:
    """Block numbers in qualified names."""

    def __init__(self, blocks: str):
        self._pattern = re.compile(rf"({re.escape(blocks)}\.)(\d+)(|\..*)")
        self._parts: dict[str, tuple[str, int, str] | None] = {}
        self._shifted: dict[tuple[str, int], str] = {}

    def _split(self, name: str) -> tuple[str, int, str] | None:
        if name not in self._parts:
            found = self._pattern.fullmatch(name)
            self._parts[name] = (found[1], int(found[2]), found[3]) if found else None
        return self._parts[name]

    def block(self, name: str) -> int | None:
        """The block that ``name`` is in, or None."""
        parts = self._split(name)
        return parts[1] if parts else None

    def shifted(self, name: str, shift: int) -> str:
        """``name`` with the number of its block, if it is in one, raised by ``shift``."""
        found = self._shifted.get((name, shift))
        if found is None:
            parts = self._split(name)
            found = self._shifted[name, shift] = f"{parts[0]}{parts[1] + shift}{parts[2]}" if parts else name
        return found


@dataclass(frozen=True)
class Segment:
    """Events [start, stop) that belong to ``block``; None: to no block."""

    block: int | None
    start: int
    stop: int


Region = list[Segment]
"""Segments in order, each block at most once."""


class Cutting:
    """Cuts a trace into regions, and these into segments; every event is in one."""

    def __init__(self, trace: Trace, names: Names):
        self.events, self.storages, self.names = trace.events, trace.storages, names
        self.owners = [self.names.block(self.storages[number].module) for number in self._parameters()]

    def _parameters(self) -> Iterator[int]:
        for event in self.events:
            if not isinstance(event, Alloc) or self.storages[event.storage].category != "parameter":
                return
            yield event.storage

    def regions(self) -> Iterator[Region]:
        """In order; the first one lists the parameters, an event each."""
        first = len(self.owners)
        yield self._listing(enumerate(self.owners), first)
        rest = first
        while isinstance(self.events[rest], Alloc):
            rest += 1
        labels = [(place, self._block_of(place)) for place in range(first, rest)]
        yield self._listing(labels, rest)
        while rest < len(self.events):
            start, phase = rest, self.events[rest].phase
            while rest < len(self.events) and self.events[rest].phase == phase:
                rest += 1
            if phase == "step":
                yield from self._step(start, rest)
            else:
                yield self._pass(start, rest, -1 if phase == "backward" else 1)

    def _block_of(self, place: int) -> int | None:
        event = self.events[place]
        return self.names.block(self.storages[event.storage].module) if isinstance(event, Alloc) else None

    @staticmethod
    def _listing(labels: Iterable[tuple[int, int | None]], stop: int) -> Region:
        """labels: (where, the block from there on), in order."""
        cuts = [next(group) for _, group in groupby(labels, key=lambda label: label[1])]
        ends = [*(place for place, _ in cuts[1:]), stop][: len(cuts)]
        return [Segment(block, place, end) for (place, block), end in zip(cuts, ends, strict=True)]

    def _pass(self, start: int, stop: int, direction: int) -> Region:
        """A forward (direction 1) or backward (−1): a segment begins with an operator of a block further on."""
        labels: list[tuple[int, int | None]] = [(start, None)]
        leaves = None
        for place in range(start, stop):
            event = self.events[place]
            if not isinstance(event, Op):
                continue
            block, at = self.names.block(event.module), labels[-1][1]
            if block is not None and (at is None or direction * (block - at) > 0):
                labels.append((place, block))
                leaves = None
            elif block is None and event.module and leaves is None:
                leaves = place  # what follows the last block begins with an operator that is in no block
        if labels[-1][1] is not None and leaves is not None:
            labels.append((leaves, None))
        return self._listing(labels, stop)

    def _step(self, start: int, stop: int) -> Iterator[Region]:
        """The optimizer's step: moments, if it makes them; the update; and gradients that are released."""
        makes, releases = [], []
        for place in range(start, stop):
            event = self.events[place]
            if isinstance(event, Op) and event.name == "aten.zeros.default":
                makes.append(place)  # a parameter's count of steps, the first of its states
            elif isinstance(event, Free) and self.storages[event.storage].category == "gradient":
                releases.append(place)
        update = next(p for p in range(start, stop) if getattr(self.events[p], "name", "") == UPDATE)
        last = releases[-1] + 1 if releases else stop
        for places, end in ((makes, update), (releases, last)):
            if len(places) not in (0, len(self.owners)):
                raise NotPeriodic(f"found {len(places)} states or gradients of {len(self.owners)} parameters")
            first = places[0] if places else end
            yield [Segment(None, start, first)]
            if places:
                yield self._listing(zip(places, self.owners, strict=True), end)
            start = end
        yield [Segment(None, start, stop)]


UPDATE = "aten._foreach_add_.Scalar"
"""The operator with which the optimizer's update begins: steps are counted, of all parameters at once."""
