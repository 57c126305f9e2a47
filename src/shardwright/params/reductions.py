"""Reductions: the gradients of a store's parameter groups travel, in an order that ranks agree on, and land.

| when                 | what                                                                                      |
|----------------------|-------------------------------------------------------------------------------------------|
| backward begins      | ranks agree on the order of launches (launches.py), if any gradient is to be reduced      |
| a launch is due      | its gradients start to travel; those of the launch before land                            |
| backward ends        | all that is left travels, then what came after its launch; what no rank formed is none    |
| gradients accumulate | they are added up on this rank (accumulated.py), and nobody is asked                      |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.comm.agreement import Agreement, agree
from shardwright.comm.divergence import DivergenceError
from shardwright.params.gradient_bucketing import GradientBucketing
from shardwright.params.launches import Launch, Launches
from shardwright.params.parameter_group import Handles, ParameterGroup
from shardwright.params.shard import Shard
from shardwright.runtime.bucket import Load
from shardwright.spec.sharding import ONCE_A_STEP

TURNS = 16
"""How often, at most, reductions are advanced while one parameter group's gradients are made."""


class Reductions:
    """Of the ``param_groups`` of one schedule.

    accumulating: gradients of those levels are accumulated unreduced for now. agreement: between the ranks that store
    the parameter groups together, where they are to agree before they communicate. unused_are_zeros: ranks may use
    different parameters; what one does not use has a gradient of zero there. alike: ranks run the same code, so that
    what nobody announced (a compiled site's) is reduced when its parameter group is complete, and not when backward
    ends. travels: told of a parameter group whose gradients have begun to travel.
    """

    def __init__(
        self, param_groups: Sequence[ParameterGroup], unused_are_zeros: bool, travels: Callable[[ParameterGroup], None]
    ):
        self.param_groups, self.unused_are_zeros = param_groups, unused_are_zeros
        self.agreement: Agreement | None = None
        self.accumulating: tuple[str, ...] = ()
        self.alike = True
        self._travels = travels
        self._launches: Launches | None = None
        self._order: list[int] = []  # in which gradients arrived in the last backward, by the parameters' numbers
        self._absent: set[int] = set()  # expected in the last backward, and formed by no rank
        self._moving: deque[tuple[Iterator[Handles], Handles]] = deque()
        self._bucketing = GradientBucketing()
        self._made = 0  # bytes of gradients since reductions were last advanced

    @property
    def members(self) -> list[Shard]:
        """Every stored parameter; its place here is its number on every rank."""
        return [stored for param_group in self.param_groups for stored in param_group.members]

    @property
    def group_of(self) -> dict[Shard, ParameterGroup]:
        """Stored parameter → its group, in the order of ``members``."""
        return {stored: param_group for param_group in self.param_groups for stored in param_group.members}

    @property
    def under_way(self) -> bool:
        """Whether a backward is at work."""
        return self._launches is not None

    @property
    def issued(self) -> int:
        """How many launches this backward has issued."""
        return 0 if self._launches is None else self._launches.issued

    # -- a backward

    def begin(self) -> None:
        """A backward begins."""
        self._made, group_of = 0, self.group_of
        for param_group in self.param_groups:
            param_group.begin_backward()
        self._launches = Launches([(group_of[stored], stored) for stored in self._agreed_order()])
        for param_group in self.param_groups:
            if param_group.sharding.level not in self.accumulating:
                self._bucketing.expect([stored for stored in param_group.members if stored.trains])

    @property
    def _reducing(self) -> bool:
        """Whether gradients of any parameter group are reduced for now, so that ranks must agree on how."""
        return any(
            param_group.sharding.level not in self.accumulating
            for param_group in self.param_groups
            if param_group.trained_bytes
        )

    def _agreed_order(self) -> list[Shard]:
        """The parameters whose gradients are expected: as they came in the last backward, new ones as used."""
        members = self.members
        numbers = {stored: number for number, stored in enumerate(members)}
        first_use: dict[int, int] = {}
        for param_group in self.param_groups:
            for use in param_group.uses:
                if use.stored is not None:
                    number = numbers[use.stored]
                    first_use[number] = min(use.number, first_use.get(number, use.number))
        expected = {
            number
            for number, stored in enumerate(members)
            if stored.sharding.level not in self.accumulating
            and stored.trains
            and (number in first_use or stored.has_accumulated)
        }
        known = [number for number in self._order if number in expected]
        accumulated = {number for number in expected if members[number].has_accumulated}
        new = expected - set(known) - (self._absent - accumulated)
        order = known + sorted(new, key=lambda number: (-first_use.get(number, 0), -number))
        if self._reducing:
            facts: dict[str, Any] = {"accumulates": list(self.accumulating), "expects": order}
            answer = agree(self.agreement, "begins a backward", **facts)
            if len({tuple(said["accumulates"]) for said in answer.facts}) > 1:
                raise DivergenceError(
                    "ranks differ: some accumulate gradients without synchronisation (no_sync), others reduce them; "
                    "allowed: the same on every rank"
                )
            order = list(dict.fromkeys(number for said in answer.facts for number in said["expects"]))
        return [members[number] for number in order]

    def end(self) -> None:
        """A backward ends: every gradient lands. Raises DivergenceError where ranks formed different ones."""
        assert self._launches is not None
        for param_group in self.param_groups:
            if param_group.has_fresh:
                self.complete(param_group)
        self._launches.close_all()
        self.launch()
        self._finish_moving()
        arrived = self._launches.arrived
        self._launches = None
        if self._reducing:
            self._settle(arrived)

    def abandon(self) -> None:
        """Drops what an aborted backward left: its gradients count for nothing."""
        self._launches = None
        while self._moving:
            _, handles = self._moving.popleft()
            for handle in handles:
                handle.finish()
        self._bucketing.abandon()
        for param_group in self.param_groups:
            param_group.drop()

    def _finish_moving(self) -> None:
        while self._moving:
            self._step_all()
        self._bucketing.finish()

    def _settle(self, arrived: dict[Shard, None]) -> None:
        """Gradients that came after their launch are reduced; where no rank had one, none is left behind.

        Raises DivergenceError where ranks formed gradients of different parameters, and that was not asked for.
        """
        group_of = self.group_of
        members = list(group_of)
        numbers = {stored: number for number, stored in enumerate(members)}
        came = [numbers[stored] for stored in arrived]
        late = [number for number, stored in enumerate(members) if stored.has_fresh]
        answer = agree(self.agreement, "ends a backward", formed=sorted({*came, *late}), late=late)
        formed = {number for said in answer.facts for number in said["formed"]}
        self._order = came + [number for number in late if number not in came]
        self._absent = {number for number in range(len(members)) if number not in formed} & (
            self._absent | {numbers[stored] for stored in members if stored.in_doubt}
        )
        late = sorted({number for said in answer.facts for number in said["late"]})
        if self.unused_are_zeros or all(set(said["formed"]) == formed for said in answer.facts):
            for param_group in self.param_groups:
                chosen = tuple(members[number] for number in late if group_of[members[number]] is param_group)
                if chosen:
                    self._issue(Launch(param_group, chosen, last=True))
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
            f"{group_of[members[first]].name or 'the root'}: {members[first].name}: {told}; allowed: the same "
            'parameters on every rank, or unused="zeros"'
        )

    # -- launches

    def arrive(self, stored: Shard) -> None:
        """The gradient of ``stored`` is whole, if it has one: it may travel."""
        if not stored.has_fresh or self._launches is None:
            return
        self._launches.arrive(stored)
        if stored.sharding.level in self.accumulating:
            stored.accumulate()
        self.launch()

    def complete(self, param_group: ParameterGroup) -> None:
        """No living use is left in this backward: W is released, and what was deposited is reduced."""
        if param_group.gathered and not (param_group.open or param_group.busy or param_group.sharding.resident):
            param_group.release()
        self.close(param_group)
        param_group.expired = param_group.expired or not self.accumulating  # a step of the optimizer comes next

    def close(self, param_group: ParameterGroup) -> None:
        """The backward of ``param_group`` is over: its gradients travel."""
        if self._launches is None:
            return
        if param_group.sharding.level in self.accumulating:
            for stored in param_group.members:
                stored.accumulate()
        self._launches.close(param_group)
        self.launch()
        if self.alike:
            left = tuple(
                stored for stored in param_group.members if stored.has_fresh and not self._launches.expects(stored)
            )
            if left:
                self._issue(Launch(param_group, left, last=True))
        self._travels(param_group)

    def launch(self, least: int = 0, ahead: bool = True) -> None:
        """Issues the launches whose turn has come: at ``least`` so many. ahead: the next parameter group may be
        gathered then.
        """
        while self._launches is not None and (launch := self._launches.pop_due(least)) is not None:
            self._issue(launch)
            if ahead:
                self._travels(launch.param_group)

    def _issue(self, launch: Launch) -> None:
        """Its gradients start to travel; what travelled before goes on a stage.

        So the unreduced gradients of one launch are alive in a group, beside those that are being formed.
        """
        fresh: list[tuple[Shard, torch.Tensor]] = []
        for stored in launch.members:
            gradient = stored.take_fresh()
            if gradient is not None and self._launches is not None:
                self._launches.arrive(stored)
            if gradient is None and self.agreement is not None:
                gradient = stored.zero_gradient()
            if gradient is not None:
                fresh.append((stored, gradient))
            del gradient
        fresh = [(stored, gradient) for stored, gradient in fresh if not self._bucketing.take(stored, gradient)]
        if fresh:
            self._step_all()
            stages = launch.param_group.reduction(fresh)
            del fresh
            self._continue(stages)

    def load(self, stored: Shard) -> Load | None:
        """What a gradient of ``stored`` fills of a bucket; None where it travels by itself."""
        return self._bucketing.load(stored)

    def _step_all(self) -> None:
        for _ in range(len(self._moving)):
            self._continue(self._moving.popleft()[0])

    def _continue(self, stages: Iterator[Handles]) -> None:
        with torch.no_grad():
            handles = next(stages, None)
        if handles is not None:
            self._moving.append((stages, handles))

    def advance(self, param_group: ParameterGroup, stored: Shard) -> None:
        """A gradient of a member was made: lets reductions under way take in what is next to arrive.

        Once for each sixteenth of its parameter group: small gradients come so close to each other that to wait at each
        of them would leave nothing to travel beside the products.
        """
        self._made += stored.whole_bytes
        if TURNS * self._made < param_group.trained_bytes:
            return
        self._made = 0
        for _, handles in self._moving:
            for handle in handles:
                handle.advance()
        self._bucketing.advance()

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
