"""The schedule: which units are gathered, which comes next, and how many may be alive at once.

The order in which units are asked for is recorded in the first forward and in the first backward; from the next one on
the units that come next are gathered ahead, as far as the stated number of living units allows. No decision reads the
time or whether a collective has finished, so every rank, and a rehearsal, decides alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from shardwright.comm.bucket import Load
from shardwright.params.sharing import Sharing
from shardwright.params.unit import Handles, Unit
from shardwright.sharding import ONCE_A_STEP, Sharding

if TYPE_CHECKING:
    from shardwright.params.stored import StoredParameter


TURNS = 16
"""How often, at most, reductions are advanced while one unit's gradients are made."""


class InFlightError(RuntimeError):
    """More units gathered at once than stated; the message names the unit that asked."""


class _Order:
    """The units that one kind of pass asks for, as the last whole pass had it."""

    def __init__(self) -> None:
        self.known: list[Unit] = []
        self.now: list[Unit] = []
        self._alike = True

    def begin(self) -> None:
        """A new pass of this kind."""
        if self.now:
            self.known, self.now, self._alike = self.now, [], True

    def arrive(self, unit: Unit) -> list[Unit]:
        """``unit`` is asked for; those that come after it, as long as this pass goes like the known one."""
        place = len(self.now)
        self.now.append(unit)
        self._alike = self._alike and place < len(self.known) and self.known[place] is unit
        return self.known[place + 1 :] if self._alike else []


class Schedule:
    """Of the units of one model.

    in_flight: how many units may be gathered at once, those that stay gathered by their level aside.
    accumulating: gradients of those levels are put by for now, whole and unreduced.
    """

    def __init__(self, in_flight: int = 2):
        self.in_flight = in_flight
        self.accumulating: tuple[str, ...] = ()
        self.units: list[Unit] = []
        self._orders = {kind: _Order() for kind in ("forward", "backward")}
        self._kind = ""
        self._task = -1
        self._at: Unit | None = None
        self._following: list[Unit] = []
        self._moving: deque[tuple[Iterator[Handles], Handles]] = deque()
        self._sharing = Sharing()
        self._made = 0  # bytes of gradients since reductions were last advanced

    def new_unit(self, name: str, sharding: Sharding) -> Unit:
        """A unit without members yet."""
        unit = Unit(name, self, sharding)
        self.units.append(unit)
        return unit

    # -- gathering

    def ask(self, unit: Unit, wait: bool = True, again: bool = False) -> None:
        """Every W of ``unit`` is there when this returns (or on its way, without ``wait``), and the next one is, too.

        again: also those that this backward has released. Raises InFlightError where more units would be alive than
        stated.
        """
        self.begin_pass()
        again = again and bool(unit.vacated)
        if self._at is unit and unit.current and not again:
            if wait:
                unit.wait()
            return
        following = self._orders[self._kind].arrive(unit)[: self.in_flight - 1] if self._at is not unit else []
        self._at = unit
        self._release_all_but(unit, following)
        if not unit.current or again:
            self._start(unit, "blocking" if wait else "async")
        if wait:
            unit.wait()
        self._following = following
        if self._task == -1 or unit.travels_as_one:
            self._gather_ahead()

    def _gather_ahead(self) -> None:
        """The unit that comes next is gathered, where there is room.

        In a forward when the one before it is asked for; in a backward when the gradients of the one before it begin to
        travel, so that its W takes the place of what was released.
        """
        following, self._following = self._following, []
        for unit in following:
            if not (unit.current or unit.busy) and self._room(unit):
                self._start(unit, "async")

    def _start(self, unit: Unit, mode: str) -> None:
        if unit.gathered and not unit.sharding.resident:
            unit.release()
        if not self._room(unit):
            alive = ", ".join(other.name for other in self._alive())
            raise InFlightError(
                f"{unit.name} is asked for while {alive} are gathered; in_flight states {self.in_flight}. "
                "Raise in_flight, or take the outer unit's parameters apart into units of their own"
            )
        unit.start(mode)

    def _alive(self) -> list[Unit]:
        return [unit for unit in self.units if unit.gathered and not unit.sharding.resident]

    def _room(self, unit: Unit) -> bool:
        """Whether ``unit`` may be gathered beside what is alive. Units that are kept for backward are not counted."""
        if unit.sharding.resident:
            return True
        others = [other for other in self._alive() if other is not unit and (other.open or other.busy or other.idle)]
        return len(others) < self.in_flight

    def _release_all_but(self, unit: Unit, following: list[Unit]) -> None:
        for other in self._alive():
            if other is not unit and other not in following and other.idle:
                other.release()

    def rest(self) -> None:
        """A forward without gradients is over: what nothing needs is released."""
        self._enter("forward")
        for unit in self._alive():
            if unit.idle:
                unit.release()

    # -- passes

    def begin_pass(self) -> None:
        """Called by whatever may be the first in a pass."""
        task = torch._C._current_graph_task_id()
        if task != -1:
            self.begin_backward(task)
            return
        if self._task != -1:
            self._abandon()  # a backward that was aborted
        if self._kind != "forward":
            self._enter("forward")

    def _enter(self, kind: str) -> None:
        self._kind, self._at, self._following = kind, None, []
        self._orders[kind].begin()

    def begin_backward(self, task: int) -> None:
        """Called by whatever happens first in a backward."""
        if self._task == task:
            return
        self._made = 0
        self._task = task  # another one than before without a forward since is a backward inside of one
        self._enter("backward")
        for unit in self.units:
            trained = [stored for stored in unit.members if stored.trains]
            unit.trained_bytes = sum(stored.whole_bytes for stored in trained)
            if unit.sharding.level not in self.accumulating:
                self._sharing.expect(trained)
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in self.units:
            if unit.has_fresh:
                unit.complete()
        while self._moving:
            self._step_all()
        self._sharing.finish()
        self._task = -1
        for unit in self.units:
            unit.busy = 0
        for unit in self._alive():
            if not unit.open and not (unit.sharding.keep and unit.uses):
                unit.release()
        self._at = None

    def _abandon(self) -> None:
        """Drops what an aborted backward left: its gradients count for nothing."""
        self._task = -1
        while self._moving:
            _, handles = self._moving.popleft()
            for handle in handles:
                handle.finish()
        self._sharing.abandon()
        for unit in self.units:
            unit.drop()

    # -- reducing

    def load(self, stored: StoredParameter) -> Load | None:
        """What a gradient of ``stored`` fills of a bucket; None where it travels by itself."""
        return self._sharing.load(stored)

    def reduce(self, unit: Unit, fresh: list[tuple[StoredParameter, torch.Tensor]]) -> None:
        """``fresh`` gradients of ``unit`` start to travel; what travelled before goes on a stage.

        So the unreduced gradients of one launch are alive in a group, beside those that are being formed.
        """
        fresh = [(stored, gradient) for stored, gradient in fresh if not self._sharing.take(stored, gradient)]
        if fresh:
            self._step_all()
            stages = unit.reduction(fresh)
            del fresh
            self._continue(stages)
        if unit is self._at:
            self._gather_ahead()

    def _step_all(self) -> None:
        for _ in range(len(self._moving)):
            self._continue(self._moving.popleft()[0])

    def _continue(self, stages: Iterator[Handles]) -> None:
        with torch.no_grad():
            handles = next(stages, None)
        if handles is not None:
            self._moving.append((stages, handles))

    def advance(self, stored: StoredParameter) -> None:
        """A gradient of ``stored`` was made: lets reductions under way take in what is next to arrive.

        Once for each sixteenth of its unit: small gradients come so close to each other that to wait at each of them
        would leave nothing to travel beside the products.
        """
        self._made += stored.whole_bytes
        if TURNS * self._made < stored.unit.trained_bytes:
            return
        self._made = 0
        for _, handles in self._moving:
            for handle in handles:
                handle.advance()
        self._sharing.advance()

    @contextmanager
    def accumulate(self, levels: tuple[str, ...] = ONCE_A_STEP) -> Iterator[None]:
        """Inside, gradients of ``levels`` are put by, whole and unreduced; the next backward outside reduces them."""
        before, self.accumulating = self.accumulating, levels
        try:
            yield
        finally:
            self.accumulating = before
