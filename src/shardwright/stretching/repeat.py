"""Repeats in a trace: what a unit of blocks does is done once more for each copy, so that the model has more blocks.

A segment speaks of blocks by their distance: it releases what its own block made in forward, and gathers the unit of
the next. Where the segments of two neighbouring units of blocks say the same, one unit more says it once more; that
they do is checked, everywhere, before anything is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any

from shardwright.stretching.segments import Cutting, Names, NotPeriodic, Region, Segment
from shardwright.trace import Alloc, Collective, Event, Free, Mark, Op, Storage, Trace, Wait


@dataclass(frozen=True)
class Repeat:
    """Blocks [first, first + period) are a unit; ``copies`` more of it follow. The next unit must be of its kind."""

    first: int
    period: int
    copies: int

    @property
    def end(self) -> int:
        """The block after the unit."""
        return self.first + self.period

    @property
    def extra(self) -> int:
        """Blocks that are added."""
        return self.period * self.copies


def repeated(trace: Trace, blocks: str, repeats: Sequence[Repeat]) -> Trace:
    """The trace of the same model with more blocks; ``arena`` stays as it is.

    blocks: qualified name of the list of blocks. repeats: in ascending order, blocks numbered as in ``trace``.
    Raises NotPeriodic where a unit and the next one do not do the same.
    """
    for repeat in reversed(repeats):
        if repeat.copies:
            trace = _Repeating(trace, Names(blocks), repeat).run()
    return trace


_Key = tuple[int, int, int]
"""(region, block, number): a storage, as the so-many-th that the block's segment in that region made."""


class _Repeating:
    """One repeat. Regions and keys speak of the short trace; a *shift* raises its blocks to those of the long one."""

    def __init__(self, trace: Trace, names: Names, repeat: Repeat):
        self.trace, self.names, self.repeat = trace, names, repeat
        self.regions = list(Cutting(trace, names).regions())
        self.maker = self._makers()
        self.events: list[Event] = []
        self.storages: list[Storage] = []
        self._numbers: dict[_Key, int] = {}  # blocks are the long trace's here
        self._living: set[int] = set()
        self._outside: dict[int, int] = {}  # number in the short trace → in the long one

    def run(self) -> Trace:
        for region in self.regions:
            self._check(region)
        listed = self._order(self.regions[0])
        self._parameters = [place for segment, _ in listed for place in range(segment.start, segment.stop)]
        for number, region in enumerate(self.regions):
            for segment, shift in self._order(region):
                self._emit(number, segment, shift)
        return Trace(self.events, self.storages, self._saved(), self.trace.arena)

    def _makers(self) -> dict[int, _Key]:
        """Storage → the segment that made it, where it is a block's."""
        makers: dict[int, _Key] = {}
        for number, region in enumerate(self.regions):
            for segment in region:
                if segment.block is not None:
                    for place, storage in enumerate(self._made(segment)):
                        makers[storage] = number, segment.block, place
        return makers

    def _made(self, segment: Segment) -> list[int]:
        events = self.trace.events[segment.start : segment.stop]
        return [event.storage for event in events if isinstance(event, Alloc)]

    # -- do neighbours do the same?

    def _check(self, region: Region) -> None:
        segments = {segment.block: segment for segment in region if segment.block is not None}
        if not segments:
            return
        for block in range(self.repeat.first, self.repeat.end):
            pair = [segments.get(block), segments.get(block + self.repeat.period)]
            said = [[*self._said(segment)] if segment else [] for segment in pair]
            for mine, following in zip_longest(*said):
                if mine != following:
                    where = self.trace.events[next(segment for segment in pair if segment).start]
                    raise NotPeriodic(
                        f"blocks {block} and {block + self.repeat.period} do not do the same in step {where.step}, "
                        f"{where.phase}: {mine} against {following}"
                    )

    def _said(self, segment: Segment) -> Iterator[tuple[Any, ...]]:
        """The segment's events, blocks told by their distance."""
        assert segment.block is not None
        back = -segment.block
        for event in self.trace.events[segment.start : segment.stop]:
            if isinstance(event, Alloc):
                made = self.trace.storages[event.storage]
                yield "alloc", event.phase, replace(made, module=self.names.shifted(made.module, back))
            elif isinstance(event, Free):
                key = self.maker.get(event.storage)
                told = ("storage", event.storage) if key is None else (key[0], key[1] - segment.block, key[2])
                yield "free", event.phase, told
            elif isinstance(event, Mark):
                yield "mark", event
            else:
                yield "event", replace(event, module=self.names.shifted(event.module, back))

    # -- the long trace

    def _order(self, region: Region) -> Iterator[tuple[Segment, int | None]]:
        """The long trace's segments in this region, as (segment of the short trace, shift; None outside of blocks)."""
        for unit, group in groupby(region, key=self._in_unit):
            members = list(group)
            if not unit:
                yield from ((segment, self._shift(segment)) for segment in members)
                continue
            shifts = range(0, self.repeat.extra + 1, self.repeat.period)
            for shift in reversed(shifts) if _descends(region) else shifts:
                yield from ((segment, shift) for segment in members)

    def _in_unit(self, segment: Segment) -> bool:
        return segment.block is not None and self.repeat.first <= segment.block < self.repeat.end

    def _shift(self, segment: Segment) -> int | None:
        if segment.block is None:
            return None
        return self.repeat.extra if segment.block >= self.repeat.end else 0

    def _emit(self, region: int, segment: Segment, shift: int | None) -> None:
        block = None if segment.block is None or shift is None else segment.block + shift
        made = 0
        for event in self.trace.events[segment.start : segment.stop]:
            if isinstance(event, Alloc):
                number = len(self.storages)
                made_of = self.trace.storages[event.storage]
                module = self._renamed(made_of.module, shift)
                self.storages.append(Storage(made_of.bytes, made_of.category, module, made_of.op))
                if block is None:
                    self._outside[event.storage] = number
                else:
                    self._numbers[region, block, made] = number
                    made += 1
                self.events.append(Alloc(event.step, event.phase, number))
                self._living.add(number)
            elif isinstance(event, Free):
                self.events.append(Free(event.step, event.phase, self._freed(event.storage, shift)))
            elif isinstance(event, Mark):
                self.events.append(event)
            elif isinstance(event, Op) and block is None and event.phase == "step":
                self.events.append(replace(event, shapes=self._lists(event.shapes)))
            else:
                self.events.append(self._moved(event, shift))

    def _moved(self, event: Op | Collective | Wait, shift: int | None) -> Op | Collective | Wait:
        module = self._renamed(event.module, shift)
        if module == event.module:
            return event
        if isinstance(event, Op):  # most events: dataclasses.replace would take several times as long
            return Op(event.step, event.phase, module, event.name, event.shapes)
        return replace(event, module=module)

    def _renamed(self, module: str, shift: int | None) -> str:
        if shift is None:
            block = self.names.block(module)
            return module if block is None else self.names.shifted(module, self._side(block))
        return self.names.shifted(module, shift) if shift else module

    def _freed(self, storage: int, shift: int | None) -> int:
        key = self.maker.get(storage)
        if key is None:
            number = self._outside[storage]
        else:
            region, block, place = key
            number = self._numbers.get((region, block + (self._side(block) if shift is None else shift), place), -1)
        if number not in self._living:
            raise NotPeriodic(f"storage {storage} of the short trace is released, but not alive, in the long one")
        self._living.remove(number)
        return number

    def _side(self, block: int) -> int:
        """The shift of a block that is spoken of outside of blocks."""
        if self.repeat.first <= block < self.repeat.end:
            raise NotPeriodic(f"block {block}, one of the repeated, is spoken of outside of blocks")
        return 0 if block < self.repeat.first else self.repeat.extra

    def _lists(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of an operator over lists that have an entry for each parameter."""
        whole = self.regions[0][-1].stop
        starts = range(0, len(shapes), whole) if len(shapes) % whole == 0 else ()
        return tuple(shapes[start + place] for start in starts for place in self._parameters) or shapes

    def _saved(self) -> list[int]:
        """Bytes held at each start of a backward: what the repeated blocks hold is held once more for each copy."""
        held, saved = dict[int, int](), list[int]()
        for event in self.trace.events:
            if isinstance(event, Alloc):
                made, key = self.trace.storages[event.storage], self.maker.get(event.storage)
                if made.category == "saved" and key is not None and self.repeat.first <= key[1] < self.repeat.end:
                    held[event.storage] = made.bytes
            elif isinstance(event, Free):
                held.pop(event.storage, None)
            elif isinstance(event, Mark) and event.point == "after loss":
                saved.append(self.trace.saved[len(saved)] + self.repeat.copies * sum(held.values()))
        return saved


def _descends(region: Region) -> bool:
    blocks = [segment.block for segment in region if segment.block is not None]
    return blocks[0] > blocks[-1]
