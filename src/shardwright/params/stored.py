"""A stored parameter: the shard that products lease W from and deposit dW in, by way of the schedule."""

from __future__ import annotations

import torch

from shardwright.params.parameter_group import ParameterGroup, Use
from shardwright.params.schedule import Schedule
from shardwright.params.shard import Shard
from shardwright.runtime.runtime import Runtime
from shardwright.spec.sharding import Sharding


class StoredParameter(Shard):
    """A shard in its parameter group.

    parameter, partial_axes, name, storage, rows: as a shard's. schedule, param_group: by default of its own, stored
    whole.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        runtime: Runtime,
        partial_axes: tuple[str, ...],
        name: str,
        schedule: Schedule | None = None,
        param_group: ParameterGroup | None = None,
        storage: tuple[str, ...] = (),
        rows: int | None = None,
    ):
        super().__init__(runtime, partial_axes, name)
        schedule = schedule or Schedule()
        self.store_as(parameter, schedule, param_group or schedule.new_param_group(name, Sharding()), storage, rows)

    def store_as(
        self,
        parameter: torch.nn.Parameter,
        schedule: Schedule,
        param_group: ParameterGroup,
        storage: tuple[str, ...] = (),
        rows: int | None = None,
    ) -> None:
        """Joins ``param_group`` of ``schedule``; from now on ``parameter`` is what is stored."""
        self.schedule, self.param_group = schedule, param_group
        self.keep(parameter, param_group.sharding, storage, rows)
        param_group.members.append(self)

    def replace(self, parameter: torch.nn.Parameter) -> None:
        """``parameter`` is what is stored from now on, alike in all but its values."""
        self.become(parameter)
        self.param_group.expired = True

    # -- W

    def lease(self, use: Use | None = None) -> torch.Tensor:
        """W as products read it: good until another parameter group is asked for, or the backward of ``use`` is over.

        Raises RuntimeError where the stored parameter was written to since ``use`` was announced.
        """
        if use is not None:
            self.check_unmodified(use.version)
        return self.lease_whole() if self.gathers else self.local

    def lease_whole(self) -> torch.Tensor:
        """All of W, where it is gathered: good until another parameter group is asked for."""
        self.schedule.ask(self.param_group, again=self in self.param_group.vacated)
        return self.whole

    def fetch(self) -> None:
        """Starts to gather W, if it is not there: ``lease`` will wait for it."""
        if self.gathers:
            self.schedule.ask(self.param_group, wait=False)

    # -- a backward to come, and its gradient

    def use(self, needed: bool = False) -> Use | None:
        """Announces a backward to come, which ``finish`` ends.

        needed: it reads W even where no gradient of W is wanted. None where nothing will come, and in a replay inside
        backward.
        """
        wanted = self.parameter.requires_grad or needed
        if not (wanted and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return None
        self.schedule.begin_pass()
        return self.schedule.announce(self.param_group, self)

    def deposit(self, gradient: torch.Tensor, owned: bool = True) -> None:
        """Takes over ``gradient`` (of the shape leased, contiguous) during backward.

        owned: nobody else holds its memory, which may be written to.
        """
        self.schedule.begin_backward(torch._C._current_graph_task_id())
        self.schedule.reductions.advance(self.param_group, self)
        self.collect(gradient, owned)

    def finish(self, use: Use | None) -> None:
        """The backward of ``use`` is over: it reads W no more, and deposits nothing more."""
        if use is not None:
            self.schedule.done(self.param_group, self, use)
        if not self.param_group.uses:
            self.schedule.reductions.complete(self.param_group)
