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
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable

from shardwright import trace
from shardwright.comm.agreement import Agreement, Answer, DivergenceError
from shardwright.comm.bucket import Load
from shardwright.params.launches import Launch, Launches
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
    accumulating: gradients of those levels are accumulated unreduced for now. agreement: between the ranks that store
    the units together, where they are to agree before they communicate. unused_are_zeros: ranks may use different
    parameters; what one does not use has a gradient of zero there.
    """

    def __init__(self, in_flight: int = 2, unused_are_zeros: bool = False):
        self.in_flight = in_flight
        self.unused_are_zeros = unused_are_zeros
        self.agreement: Agreement | None = None
        self.agrees_on_gathers = True
        self.accumulating: tuple[str, ...] = ()
        self.units: list[Unit] = []
        self._launches: Launches | None = None
        self._order: list[int] = []  # in which gradients arrived in the last backward, by the parameters' numbers
        self._absent: set[int] = set()  # expected in the last backward, and formed by no rank
        self._number = 0
        self.inside = 0  # forwards of the root module at work
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

    @property
    def members(self) -> list[StoredParameter]:
        """Every stored parameter; its place here is its number on every rank."""
        return [stored for unit in self.units for stored in unit.members]

    def number_of_use(self) -> int:
        """The next number of a use."""
        self._number += 1
        return self._number

    def _agree(self, what: str, count: int = 0, **facts: Any) -> Answer:
        """Ranks that state different things to do raise DivergenceError; other ``facts`` may differ."""
        if self.agreement is None:
            return Answer(True, (facts,), count)
        answer = self.agreement.state({"do": what, **facts}, count)
        if not answer.alike and len({said["do"] for said in answer.facts}) > 1:
            told = self.agreement.by_answer(tuple(f"{said['do']}" for said in answer.facts))
            raise DivergenceError(f"ranks differ: {told}; allowed: parameter groups used alike on every rank")
        return answer

    # -- gathering

    def begin_forward(self, is_part: bool = False) -> bool:
        """A forward begins: what was gathered before and has been written since is out of date, on every rank.

        Returns whether the model ``is_part`` of something larger for any rank.
        """
        if torch._C._current_graph_task_id() != -1:
            return is_part  # a replay
        self.begin_pass()
        if not any(unit.gathers for unit in self.units):
            return is_part
        written = self._written()
        if any(unit.communicates for unit in self.units):
            answer = self._agree("begins a forward", written=written, is_part=is_part)
            is_part = any(said["is_part"] for said in answer.facts)
            written = sorted({number for said in answer.facts for number in said["written"]})
        for number in written:
            self.units[number].expired = True
        if self.unused_are_zeros:  # a rank that uses other modules gathers for the others all the same
            for unit in self.units:
                if unit.sharding.resident and unit.gathers and not unit.current:
                    self._start(unit, "async")
        return is_part

    def _written(self) -> list[int]:
        """The numbers of units whose gathered W is not what is stored; the device is waited for once."""
        flags = [(number, flag) for number, unit in enumerate(self.units) for flag in unit.was_written()]
        found = {number for number, unit in enumerate(self.units) if unit.gathered and unit.expired}
        if flags and not isinstance(flags[0][1], FakeTensor):
            with trace.quiet():
                told = torch.stack([flag for _, flag in flags]).tolist()
            found.update(number for (number, _), yes in zip(flags, told, strict=True) if yes)
        return sorted(found)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward was the last that was heard of."""
        return self._kind == "forward"

    def begin_call(self) -> None:
        """A module with parameters of the store is called: by itself, a forward begins."""
        if not self.inside and not any(unit.open for unit in self.units):
            self.begin_forward()

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
        if unit.communicates and self.agrees_on_gathers:
            issued = 0 if self._launches is None else self._launches.issued
            answer = self._agree(f"gathers {unit.name or 'the root'} in {self._kind}", issued)
            self._launch(answer.most, ahead=False)
        unit.start(mode)

    def _alive(self) -> list[Unit]:
        return [unit for unit in self.units if unit.gathered and not unit.sharding.resident]

    def release_idle(self) -> None:
        """What no forward and no backward is at work with is released."""
        for unit in self._alive():
            if unit.idle:
                unit.release()

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
        self.release_idle()

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
            unit.begin_backward()
        self._launches = Launches(self._agreed_order())
        for unit in self.units:
            if unit.sharding.level not in self.accumulating:
                self._sharing.expect([stored for stored in unit.members if stored.trains])
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._end_backward)

    @property
    def _reducing(self) -> bool:
        """Whether gradients of any unit are reduced for now, so that ranks must agree on how."""
        return any(unit.sharding.level not in self.accumulating for unit in self.units if unit.trained_bytes)

    def _agreed_order(self) -> list[StoredParameter]:
        """The parameters whose gradients are expected: as they came in the last backward, new ones as used."""
        members = self.members
        numbers = {stored: number for number, stored in enumerate(members)}
        first_use: dict[int, int] = {}
        for unit in self.units:
            for use in unit.uses:
                if use.stored is not None:
                    number = numbers[use.stored]
                    first_use[number] = min(use.number, first_use.get(number, use.number))
        expected = {
            number
            for number, stored in enumerate(members)
            if stored.unit.sharding.level not in self.accumulating
            and stored.trains
            and (number in first_use or stored.has_accumulated)
        }
        known = [number for number in self._order if number in expected]
        accumulated = {number for number in expected if members[number].has_accumulated}
        new = expected - set(known) - (self._absent - accumulated)
        order = known + sorted(new, key=lambda number: (-first_use.get(number, 0), -number))
        if self._reducing:
            facts: dict[str, Any] = {"accumulates": list(self.accumulating), "expects": order}
            answer = self._agree("begins a backward", **facts)
            if len({tuple(said["accumulates"]) for said in answer.facts}) > 1:
                raise DivergenceError(
                    "ranks differ: some accumulate gradients without synchronisation (no_sync), others reduce them; "
                    "allowed: the same on every rank"
                )
            order = list(dict.fromkeys(number for said in answer.facts for number in said["expects"]))
        return [members[number] for number in order]

    def _end_backward(self) -> None:
        if self._launches is None:  # a backward inside of this one has ended it
            return
        for unit in self.units:
            if unit.has_fresh:
                unit.complete()
        self._launches.close_all()
        self._launch()
        self._finish_moving()
        try:
            if self._reducing:
                self._settle(self._launches.arrived)
        finally:
            self._launches = None
            self._task = -1
            for unit in self.units:
                unit.busy = 0
                if self.unused_are_zeros and not self.accumulating:
                    unit.expired = True  # on every rank alike, whichever it used
            for unit in self._alive():
                if not unit.open and not (unit.sharding.keep and unit.uses):
                    unit.release()
            self._at = None

    def _finish_moving(self) -> None:
        while self._moving:
            self._step_all()
        self._sharing.finish()

    def _settle(self, arrived: dict[StoredParameter, None]) -> None:
        """Gradients that came after their launch are reduced; where no rank had one, none is left behind.

        Raises DivergenceError where ranks formed gradients of different parameters, and that was not asked for.
        """
        members = self.members
        numbers = {stored: number for number, stored in enumerate(members)}
        came = [numbers[stored] for stored in arrived]
        late = [number for number, stored in enumerate(members) if stored.has_fresh]
        answer = self._agree("ends a backward", formed=sorted({*came, *late}), late=late)
        formed = {number for said in answer.facts for number in said["formed"]}
        self._order = came + [number for number in late if number not in came]
        self._absent = {number for number in range(len(members)) if number not in formed} & (
            self._absent | {numbers[stored] for stored in members if stored.in_doubt}
        )
        late = sorted({number for said in answer.facts for number in said["late"]})
        if self.unused_are_zeros or all(set(said["formed"]) == formed for said in answer.facts):
            for unit in self.units:
                chosen = tuple(members[number] for number in late if members[number].unit is unit)
                if chosen:
                    self._issue(Launch(unit, chosen, last=True))
            self._finish_moving()
            for number, stored in enumerate(members):
                stored.settle(number in formed)
            return
        for stored in members:
            stored.drop()
        first = min(number for number in formed if any(number not in said["formed"] for said in answer.facts))
        assert self.agreement is not None
        told = self.agreement.by_answer(
            tuple("formed its gradient" if first in said["formed"] else "did not" for said in answer.facts)
        )
        raise DivergenceError(
            f"{members[first].unit.name or 'the root'}: {members[first].name}: {told}; allowed: the same parameters on "
            'every rank, or unused="zeros"'
        )

    def _abandon(self) -> None:
        """Drops what an aborted backward left: its gradients count for nothing."""
        self._task, self._launches = -1, None
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

    def arrive(self, stored: StoredParameter) -> None:
        """The gradient of ``stored`` is whole, if it has one: it may travel."""
        if not stored.has_fresh or self._launches is None:
            return
        self._launches.arrive(stored)
        if stored.unit.sharding.level in self.accumulating:
            stored.accumulate()
        self._launch()

    def close(self, unit: Unit) -> None:
        """The backward of ``unit`` is over: its gradients travel."""
        if self._launches is None:
            return
        if unit.sharding.level in self.accumulating:
            for stored in unit.members:
                stored.accumulate()
        self._launches.close(unit)
        self._launch()
        if unit is self._at:
            self._gather_ahead()

    def _launch(self, least: int = 0, ahead: bool = True) -> None:
        """Issues the launches whose turn has come: at ``least`` so many. ahead: the next unit may be gathered then."""
        while self._launches is not None and (launch := self._launches.pop_due(least)) is not None:
            self._issue(launch)
            if ahead and launch.unit is self._at:
                self._gather_ahead()

    def _issue(self, launch: Launch) -> None:
        """Its gradients start to travel; what travelled before goes on a stage.

        So the unreduced gradients of one launch are alive in a group, beside those that are being formed.
        """
        fresh: list[tuple[StoredParameter, torch.Tensor]] = []
        for stored in launch.members:
            gradient = stored.take_fresh()
            if gradient is not None and self._launches is not None:
                self._launches.arrive(stored)
            if gradient is None and self.agreement is not None:
                gradient = stored.zero_gradient()
            if gradient is not None:
                fresh.append((stored, gradient))
            del gradient
        fresh = [(stored, gradient) for stored, gradient in fresh if not self._sharing.take(stored, gradient)]
        if fresh:
            self._step_all()
            stages = launch.unit.reduction(fresh)
            del fresh
            self._continue(stages)

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

    def discard_accumulated(self) -> None:
        """Forgets what earlier micro-batches left, unreduced."""
        for stored in self.members:
            stored.discard_accumulated()

    @contextmanager
    def accumulate(self, levels: tuple[str, ...] = ONCE_A_STEP) -> Iterator[None]:
        """Inside, gradients of ``levels`` accumulate, whole and unreduced; the next backward outside reduces them.

        An exception that ends it discards what has accumulated.
        """
        before, self.accumulating = self.accumulating, levels
        try:
            yield
        except BaseException:
            self.discard_accumulated()
            raise
        finally:
            self.accumulating = before
