"""What the store does with one site's gradients, as a formula: params/parameter_group.py and params/schedule.py in
numbers.

A unit's gradients travel when a fair share of them is ready and as much is still to come; the last ones travel when its
last use is over. Launches of one kind over one group are one collective, which stands where the first one is. What is
reduce-scattered and partial over other axes too is all-reduced there when the next launch comes, or at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwright.formulas.place import Group, Move, Moves
from shardwright.spec.sharding import FAIR_SHARE


@dataclass(frozen=True)
class Stored:
    """One parameter of a unit.

    whole: bytes over the whole mesh. trains, used: a gradient is wanted; its backward was announced. unreduced: bytes
    of the gradient as the product made it, part: as it is stored, scratch: of its reduce-scatter. scatter, reduce: the
    groups over which it is reduce-scattered and then all-reduced.
    """

    whole: int
    trains: bool
    used: bool
    unreduced: int
    part: int
    scratch: int
    scatter: Group
    reduce: Group


class Storing:
    """Runs the store's rule over one backward of a site.

    units: the members of each. moves: the site's collectives so far, in issue order. most: bytes of unreduced gradients
    and scratch at the worst moment after ``form``.
    """

    def __init__(self, units: Sequence[Sequence[Stored]]):
        self.moves: list[Move] = []
        self.most = 0
        self._alive = 0
        self._units = [
            _Unit(list(members), [i for i, member in enumerate(members) if member.used]) for members in units
        ]
        self._moving: list[tuple[_Unit, list[Stored]]] = []

    def add(self, moves: Moves) -> None:
        """Other collectives of the site come now."""
        self.moves += moves

    def form(self) -> None:
        """Every gradient that will be reduce-scattered is there, whole."""
        members = [member for unit in self._units for member in unit.members if member.trains]
        self._alive = sum(member.unreduced for member in members if member.scatter.size > 1)

    def finish(self, number: int, place: int) -> None:
        """The last use of that member of that unit is over."""
        unit = self._units[number]
        if place in unit.waiting:
            unit.waiting.remove(place)
            if unit.members[place].trains:
                unit.ready.append(place)
            here, to_come, every = (
                unit.bytes(places) for places in (unit.ready, unit.waiting, range(len(unit.members)))
            )
            if unit.waiting and FAIR_SHARE * min(here, to_come) >= every:
                self._launch(unit)
        if not unit.waiting:
            unit.ready.sort()
            self._launch(unit)

    def end(self) -> Moves:
        """Backward is over: every collective of the site."""
        while self._moving:
            self._step_all()
        return tuple(self.moves)

    def _launch(self, unit: _Unit) -> None:
        members, unit.ready = [unit.members[place] for place in unit.ready], []
        if not members:
            return
        self._step_all()
        scattered = [member for member in members if member.scatter.size > 1]
        if not scattered:
            self._reduce(unit, members)
            return
        for member in scattered:
            self._join(unit, "reduce_scatter", member.scatter, member.unreduced, member.part)
        self.most = max(self.most, self._alive + sum(member.scratch for member in scattered))
        self._moving.append((unit, members))

    def _step_all(self) -> None:
        moving, self._moving = self._moving, []
        for unit, members in moving:
            self._alive -= sum(member.unreduced for member in members if member.scatter.size > 1)
            self._reduce(unit, members)

    def _reduce(self, unit: _Unit, members: Sequence[Stored]) -> None:
        for member in members:
            if member.reduce.size > 1:
                self._join(unit, "all_reduce", member.reduce, member.part, 0)

    def _join(self, unit: _Unit, kind: str, group: Group, size: int, own: int) -> None:
        """One more tensor of a logical collective; the first one begins it."""
        place, whole, mine = unit.operations.get((kind, group), (len(self.moves), 0, 0))
        whole, mine = whole + size, mine + own
        unit.operations[kind, group] = place, whole, mine
        sent = whole - mine if kind == "reduce_scatter" else 2 * whole * (group.size - 1) // group.size
        self.moves[place : place + 1] = [Move(kind, group.axes, whole, sent)]


@dataclass
class _Unit:
    """A unit in backward.

    waiting, ready: places of members whose last use is to come, or over and not launched. operations: (place among the
    moves, bytes, this rank's) of each kind and group.
    """

    members: list[Stored]
    waiting: list[int]
    ready: list[int] = field(default_factory=list)
    operations: dict[tuple[str, Group], tuple[int, int, int]] = field(default_factory=dict)

    def bytes(self, places: Iterable[int]) -> int:
        """Of the members there that are trained, over the whole mesh."""
        return sum(self.members[place].whole for place in places if self.members[place].trains)
