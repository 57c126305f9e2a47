"""The schedule: which parameter groups are gathered, which comes next, and how many may be alive at once.

The order in which parameter groups are asked for is recorded in the first forward and in the first backward; from the
next one on the parameter groups that come next are gathered ahead, as far as the stated number of living parameter
groups allows. No decision reads the time or whether a collective has finished, so every rank, and a rehearsal, decides
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable

from shardwright import trace
from shardwright.comm.agreement import Agreement, agree
from shardwright.params.order import Order
from shardwright.params.parameter_group import ParameterGroup, Use
from shardwright.params.reductions import Reductions
from shardwright.params.shard import Shard
from shardwright.spec.sharding import Sharding


class InFlightError(RuntimeError):
    """More parameter groups gathered at once than stated; the message names the parameter group that asked."""


class Schedule:
    """Of the parameter groups of one model.

    in_flight: how many parameter groups may be gathered at once, those that stay gathered by their level aside.
    unused_are_zeros: ranks may use different parameters. agreement: between the ranks that store the parameter groups
    together, where they are to agree before they communicate.
    """

    def __init__(self, in_flight: int = 2, unused_are_zeros: bool = False):
        self.in_flight = in_flight
        self.unused_are_zeros = unused_are_zeros
        self.agrees_on_gathers = True
        self.param_groups: list[ParameterGroup] = []
        self.reductions: Reductions = Reductions(self.param_groups, unused_are_zeros, self._travels)
        self._number = 0
        self.inside = 0  # forwards of the root module at work
        self.orders = {kind: Order() for kind in ("forward", "backward")}
        self._kind = ""
        self._task = -1
        self._at: ParameterGroup | None = None
        self._following: list[ParameterGroup] = []

    def new_param_group(self, name: str, sharding: Sharding) -> ParameterGroup:
        """A parameter group without members yet."""
        param_group = ParameterGroup(name, sharding)
        self.param_groups.append(param_group)
        return param_group

    def join(self, inner: Schedule, prefix: str) -> None:
        """The parameter groups of ``inner`` are this schedule's from now on; ``prefix`` comes before their names."""
        for param_group in inner.param_groups:
            param_group.name = f"{prefix}.{param_group.name}".rstrip(".")
            self.param_groups.append(param_group)

    @property
    def agreement(self) -> Agreement | None:
        """Between the ranks that store the parameter groups together."""
        return self.reductions.agreement

    def announce(self, param_group: ParameterGroup, stored: Shard | None = None) -> Use:
        """A backward to come: a use of a member of ``param_group``, or of none of them for itself."""
        self._number += 1
        return param_group.announce(self._number, stored)

    def done(self, param_group: ParameterGroup, stored: Shard, use: Use, read: bool = False) -> None:
        """``use`` of a member is over; if it was its last one, its W is released, and its dW may travel.

        read: something else may still read W, until the parameter group's backward is over.
        """
        if param_group.over(stored, use, read):
            self.reductions.arrive(stored)

    # -- gathering

    def begin_forward(self, is_part: bool = False) -> bool:
        """A forward begins: what was gathered before and has been written since is out of date, on every rank.

        Returns whether the model ``is_part`` of something larger for any rank.
        """
        if torch._C._current_graph_task_id() != -1:
            return is_part  # a replay
        self.begin_pass()
        if not any(param_group.gathers for param_group in self.param_groups):
            return is_part
        written = self._written()
        if any(param_group.communicates for param_group in self.param_groups):
            answer = agree(self.agreement, "begins a forward", written=written, is_part=is_part)
            is_part = any(said["is_part"] for said in answer.facts)
            written = sorted({number for said in answer.facts for number in said["written"]})
        for number in written:
            self.param_groups[number].expired = True
        if self.unused_are_zeros:  # a rank that uses other modules gathers for the others all the same
            for param_group in self.param_groups:
                if param_group.sharding.resident and param_group.gathers and not param_group.current:
                    self._start(param_group, "async")
        return is_part

    def _written(self) -> list[int]:
        """The numbers of parameter groups whose gathered W is not what is stored; the device is waited for once."""
        flags = [
            (number, flag) for number, param_group in enumerate(self.param_groups) for flag in param_group.was_written()
        ]
        found = {
            number
            for number, param_group in enumerate(self.param_groups)
            if param_group.gathered and param_group.expired
        }
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
        if not self.inside and not any(param_group.open for param_group in self.param_groups):
            self.begin_forward()

    def ask(self, param_group: ParameterGroup, wait: bool = True, again: bool = False) -> None:
        """Every W of ``param_group`` is there when this returns (or on its way, without ``wait``), and the next one is,
        too.

        again: also those that this backward has released. Raises InFlightError where more parameter groups would be
        alive than stated.
        """
        self.begin_pass()
        again = again and bool(param_group.vacated)
        if self._at is param_group and param_group.current and not again:
            param_group.held = False
            if wait:
                param_group.wait()
            return
        param_group.held = False
        order = self.orders[self._kind]
        following = order.arrive(param_group, self.in_flight - 1) if self._at is not param_group else []
        self._at = param_group
        self._release_all_but(param_group, following)
        if not param_group.current or again:
            self._start(param_group, "blocking" if wait else "async")
        if wait:
            param_group.wait()
        self._following = following
        if self._task == -1 or param_group.travels_as_one:
            self._gather_ahead()

    def _gather_ahead(self) -> None:
        """The parameter group that comes next is gathered, where there is room.

        In a forward when the one before it is asked for; in a backward when the gradients of the one before it begin to
        travel, so that its W takes the place of what was released.
        """
        following, self._following = self._following, []
        for param_group in following:
            if not (param_group.current or param_group.busy) and self._room(param_group):
                self._start(param_group, "async")

    def _start(self, param_group: ParameterGroup, mode: str) -> None:
        if param_group.gathered and not param_group.sharding.resident:
            param_group.release()
        if not self._room(param_group):
            alive = ", ".join(other.name for other in self._alive())
            raise InFlightError(
                f"{param_group.name} is asked for while {alive} are gathered; in_flight states {self.in_flight}. "
                "Raise in_flight, or take the outer parameter group's parameters apart into groups of their own"
            )
        if param_group.communicates and self.agrees_on_gathers:
            name = param_group.name or "the root"
            answer = agree(self.agreement, f"gathers {name} in {self._kind}", self.reductions.issued)
            self.reductions.launch(answer.most, ahead=False)
        param_group.start(mode)

    def _alive(self) -> list[ParameterGroup]:
        return [
            param_group
            for param_group in self.param_groups
            if param_group.gathered and not param_group.sharding.resident
        ]

    def release_idle(self, among: Sequence[ParameterGroup] | None = None) -> None:
        """What no forward and no backward is at work with is released; by default of all parameter groups."""
        for param_group in self._alive():
            if param_group.idle and (among is None or param_group in among):
                param_group.release()

    def _room(self, param_group: ParameterGroup) -> bool:
        """Whether ``param_group`` may be gathered beside what is alive. Parameter groups that are kept for backward are
        not counted.
        """
        if param_group.sharding.resident or param_group.held:
            return True
        others = [
            other for other in self._alive() if other is not param_group and (other.open or other.busy or other.idle)
        ]
        return len(others) < self.in_flight

    def hold(self, param_group: ParameterGroup) -> None:
        """Starts to gather ``param_group``, which stays until it is asked for, or ``let_go``; ``in_flight`` aside."""
        self.begin_pass()
        param_group.held = True
        if param_group.gathers and not param_group.current:
            self._start(param_group, "async")

    def let_go(self, param_group: ParameterGroup) -> None:
        """Releases ``param_group``, where no forward and no backward is at work with it, though it were kept."""
        param_group.held = False
        at_work = param_group.open or param_group.busy or param_group.sharding.resident
        if param_group.gathered and not at_work:
            param_group.release()

    def _release_all_but(self, param_group: ParameterGroup, following: list[ParameterGroup]) -> None:
        for other in self._alive():
            if other is not param_group and other not in following and other.idle:
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
        self.orders[kind].begin()

    def begin_backward(self, task: int) -> None:
        """Called by whatever happens first in a backward."""
        if self._task == task:
            return
        self._task = task  # another one than before without a forward since is a backward inside of one
        self._enter("backward")
        self.reductions.begin()
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if not self.reductions.under_way:  # a backward inside of this one has ended it
            return
        try:
            self.reductions.end()
        except BaseException:
            self.reductions.abandon()
            raise
        finally:
            self._task = -1
            for param_group in self.param_groups:
                param_group.busy = 0
                if self.unused_are_zeros and not self.reductions.accumulating:
                    param_group.expired = True  # on every rank alike, whichever it used
            for param_group in self._alive():
                if not (param_group.open or param_group.held or (param_group.sharding.keep and param_group.uses)):
                    param_group.release()
            self._at = None

    def _travels(self, param_group: ParameterGroup) -> None:
        if param_group is self._at:
            self._gather_ahead()

    def _abandon(self) -> None:
        """Drops what an aborted backward left: its gradients count for nothing."""
        self._task = -1
        self.reductions.abandon()
