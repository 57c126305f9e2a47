"""A stored parameter: what products lease, and how its gradient is reduced once and lands.

The gradient rule: a gradient is partial over every axis that splits the work and does not split the parameter as it is
used. It is summed there once per backward, never averaged. A parameter used several times in one backward collects its
contributions first: it is reduced when its last living use has deposited, at the latest when backward ends.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from shardwright import trace
from shardwright.comm import Runtime, all_reduce
from shardwright.params.shard import wrap


class Use:
    """One use of a parameter by a forward pass whose backward is still to come. The graph that needs it holds it."""

    __slots__ = ("__weakref__",)


class StoredParameter:
    """Level ``replicate``: every rank holds its shard for good; gradients are all-reduced over ``partial_axes``.

    parameter: a DTensor parameter. partial_axes: the axes over which a fresh gradient is partial. name: for the trace.
    window: the rows [start, stop) of the local shard that this rank's products read, where not all of them (heads of
    keys and values that several ranks share); gradients of the others are zero here.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        runtime: Runtime,
        partial_axes: tuple[str, ...],
        name: str,
        window: tuple[int, int] | None = None,
    ):
        self.parameter = parameter
        self.runtime = runtime
        self.partial_axes = partial_axes
        self.name = name
        self.window = window
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        self._fresh: torch.Tensor | None = None
        self._task = -1

    def lease(self) -> torch.Tensor:
        """The local tensor that a product reads."""
        local = cast(DTensor, self.parameter)._local_tensor
        return local if self.window is None else local[self.window[0] : self.window[1]]

    def use(self) -> Use | None:
        """Announces a deposit to come. None where no gradient is wanted, and in a replay inside backward."""
        if not (self.parameter.requires_grad and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return None
        use = Use()
        self._uses.add(use)
        return use

    def deposit(self, gradient: torch.Tensor, use: Use | None) -> None:
        """Takes over ``gradient`` (of the shape leased, contiguous, owned by nobody else) during backward."""
        if self.window is not None:
            whole = torch.zeros_like(cast(DTensor, self.parameter)._local_tensor)
            whole[self.window[0] : self.window[1]] = gradient
            gradient = whole
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._fresh = None  # left over from a backward that was aborted
            self._task = task
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._settle)
        if use is not None:
            self._uses.discard(use)
        self._fresh = gradient if self._fresh is None else self._fresh.add_(gradient)
        if not self._uses:
            self._settle()

    def _settle(self) -> None:
        """Reduces what came fresh and adds it to ``.grad``."""
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return
        with torch.no_grad():
            trace.note(fresh, "gradient")
            all_reduce(fresh, self.runtime.group(self.partial_axes), self.name)
            parameter = cast(DTensor, self.parameter)
            if parameter.grad is None:
                parameter.grad = wrap(fresh, parameter.shape, parameter.device_mesh, parameter.placements)
            else:
                cast(DTensor, parameter.grad)._local_tensor.add_(fresh)
