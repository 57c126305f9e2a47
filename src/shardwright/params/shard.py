"""A shard: this rank's part of a parameter, the memory of the gathered W, and the gradient that lands.

The gradient rule: a gradient is partial over every axis that splits the work and does not split the parameter as it is
used. It is summed there once per backward, never averaged: reduce-scattered over the axes that split its storage,
all-reduced over the others. A parameter used several times in one backward collects its contributions first.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwright import trace
from shardwright.params import hooks
from shardwright.params.accumulated import AccumulatedGradient, accumulated_gradient
from shardwright.params.written import differs, fingerprint
from shardwright.runtime.runtime import Runtime
from shardwright.spec.sharding import Sharding
from shardwright.values.placement import cut_of

Version = tuple[int, int, int]
"""Of a shard: which tensor holds it, and how often autograd has seen it, and its DTensor, written."""


class Shard:
    """What a rank stores of one parameter, as ``sharding`` says.

    parameter: a DTensor parameter. partial_axes: the axes over which a fresh gradient is partial. name: for the trace.
    storage: the axes, all partial, over which dimension 0 of the used tensor [rows, …] is split.

    dtype: the element type in which products read W. gathers: whether they read another tensor than the stored one.
    whole_bytes: of the whole parameter over the mesh: the same on every rank, so that what travels may depend on it.
    divisor: what sums over ranks are divided by as they land.
    """

    def __init__(self, runtime: Runtime, partial_axes: tuple[str, ...], name: str):
        self.runtime = runtime
        self.partial_axes = partial_axes
        self.name = name
        self.divisor = 1

    def keep(
        self,
        parameter: torch.nn.Parameter,
        sharding: Sharding,
        storage: tuple[str, ...] = (),
        rows: int | None = None,
    ) -> None:
        """From now on ``parameter`` is what is stored."""
        self.sharding = sharding
        self.gather_group = self.runtime.group(storage).joined()  # storage is one axis of its mesh
        self.rest_group = self.runtime.group(tuple(axis for axis in self.partial_axes if axis not in storage))
        self.parameter = parameter
        self.stored_dtype = parameter.dtype
        self.dtype = _compute_dtype(parameter.dtype, sharding.dtype)
        self.gathers = self.gather_group.size > 1 or self.dtype != parameter.dtype
        self.whole_bytes = parameter.numel() * self.dtype.itemsize
        self._rows = rows
        self._whole: torch.Tensor | None = None
        self._fresh: torch.Tensor | None = None
        self._fresh_owned = True
        self._accumulated: AccumulatedGradient | None = None
        self._doubtful = False
        self._in_doubt: torch.Tensor | None = None
        self._anchor: torch.Tensor | None = None
        if self.trains and self.communicates:
            hooks.guard(parameter, self.name)

    # -- what is stored, and what is used

    @property
    def local(self) -> torch.Tensor:
        """This rank's stored shard."""
        return cast(DTensor, self.parameter)._local_tensor

    @property
    def anchor(self) -> torch.Tensor:
        """An empty leaf that stands for the parameter in a graph whose gradients go to the store, not to the engine.

        The parameter's own leaf is left to autograd, so that hooks on it are called with gradients only.
        """
        if self._anchor is None:
            with trace.quiet(), torch.inference_mode(False):
                self._anchor = torch.zeros(0, device=self.local.device)
        return self._anchor.requires_grad_(self.parameter.requires_grad)

    @property
    def version(self) -> Version:
        """Which tensor holds the shard, and how often it was written to, as far as autograd knows."""
        local = self.local
        return id(local), local._version, self.parameter._version

    def was_written(self) -> torch.Tensor:
        """Whether this rank's rows of the gathered W are other than what is stored: a bool [], on the device."""
        assert self._whole is not None
        with trace.quiet():
            whole = self._whole if self._whole.dim() else self._whole.reshape(1)
            start, stop = self.gather_group.bounds(whole.shape[0])
            return differs(whole[start:stop], self.local)

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the gathered W, which is what ``lease`` returns."""
        shape = self.local.shape
        return shape if self._rows is None else torch.Size((self._rows, *shape[1:]))

    @property
    def most_shape(self) -> tuple[int, ...]:
        """The whole shape on the rank that uses most, where other axes cut the parameter unevenly."""
        mesh, placements = cast(DTensor, self.parameter).device_mesh, [*cast(DTensor, self.parameter).placements]
        if self._rows is not None:
            placements[-1] = Replicate()  # the axis of its storage
        return cut_of(self.parameter.shape, mesh, placements, [0] * mesh.ndim).local_shape

    @property
    def trains(self) -> bool:
        """Whether a gradient is wanted."""
        return self.parameter.requires_grad

    @property
    def communicates(self) -> bool:
        """Whether its gradient is reduced between ranks."""
        return self.gather_group.size > 1 or self.rest_group.size > 1

    @property
    def releases(self) -> bool:
        """Whether the memory of the gathered W comes and goes."""
        return self.gathers and not self.sharding.resident

    def check_unmodified(self, version: Version, print_then: int | None = None) -> None:
        """Raises RuntimeError where it was written to since its version, and its shard's fingerprint, were these."""
        if version != self.version or print_then not in (None, fingerprint(self.local)):
            raise RuntimeError(f"{self.name}: found a parameter that was modified between its forward and its backward")

    def part(self) -> torch.Tensor:
        """The stored shard in the element type of the gathered W."""
        return self.local.to(self.dtype)

    def room(self) -> torch.Tensor:
        """Memory for the gathered W: always the same storage, so that aliases in a graph see it again."""
        owner, arena = f"{self.name} (W)", self.runtime.arena
        if self.sharding.resident:
            if self._whole is None:
                self._whole = torch.empty(self.whole_shape, dtype=self.dtype, device=self.local.device)
            trace.note(self._whole, "parameter")
        elif self._whole is None:
            self._whole = arena.lease(self.whole_shape, self.dtype, self.local.device, "gathered", owner)
        else:
            arena.renew(self._whole, "gathered", owner)
        return self._whole

    @property
    def readable(self) -> torch.Tensor:
        """W as it is now, nobody asked: what is gathered, if its parameter group is."""
        return self.local if self._whole is None else self._whole

    def vacate(self) -> None:
        """Gives the memory of the gathered W back."""
        if self._whole is not None:
            self.runtime.arena.end(self._whole)

    @property
    def whole(self) -> torch.Tensor:
        """The gathered W, which is there."""
        assert self._whole is not None
        return self._whole

    def become(self, parameter: torch.nn.Parameter) -> None:
        """``parameter`` is what is stored from now on, alike in all but its values."""
        self.parameter = parameter
        self._accumulated = None

    # -- gradients

    def collect(self, gradient: torch.Tensor, owned: bool) -> None:
        """Adds a contribution to this backward's gradient."""
        if self._fresh is None:
            self._fresh, self._fresh_owned = gradient, owned
        else:
            self._fresh = self._own_fresh().add_(gradient)

    @property
    def has_fresh(self) -> bool:
        """Whether this backward has brought something that is not reduced yet."""
        return self._fresh is not None

    @property
    def has_accumulated(self) -> bool:
        """Whether ``.grad`` is what earlier micro-batches left, unreduced."""
        return self._accumulated is not None and self.parameter.grad is self._accumulated

    def _own_fresh(self) -> torch.Tensor:
        """What was deposited, in memory that may be written to."""
        assert self._fresh is not None
        fresh = self._fresh if self._fresh_owned else self._fresh.clone()
        self._fresh, self._fresh_owned = None, True
        return fresh

    def accumulate(self) -> None:
        """Adds what was deposited to what earlier micro-batches left, whole and unreduced, in the stored dtype.

        It is the parameter's ``.grad`` meanwhile, a DTensor whose placement is partial: so whoever clears gradients
        clears it too. A reduced gradient that was there already joins it, as the share of one rank.
        """
        if self._fresh is None:
            return
        if self.has_accumulated:
            fresh, self._fresh = self._fresh, None
            cast(AccumulatedGradient, self._accumulated)._local_tensor.add_(fresh)
            return
        whole = self.widened(self._own_fresh())
        trace.note(whole, "gradient")
        parameter = cast(DTensor, self.parameter)
        if parameter.grad is not None and self.rest_group.index == 0:
            start, stop = self.gather_group.bounds(whole.shape[0]) if whole.dim() else (0, 1)
            rows = whole[start:stop] if whole.dim() else whole
            rows.add_(cast(DTensor, parameter.grad)._local_tensor, alpha=self.divisor)
        scattered = "_".join(self.gather_group.axes) if self.gather_group.size > 1 else ""
        self._accumulated = accumulated_gradient(whole, parameter, (*self.partial_axes, scattered))
        parameter.grad = self._accumulated

    def take_fresh(self) -> torch.Tensor | None:
        """What is to be reduced, or None; with it goes what was accumulated."""
        if self.has_accumulated:
            self.accumulate()
            self._fresh = cast(AccumulatedGradient, self._accumulated)._local_tensor
            self._fresh_owned, self.parameter.grad = True, None
        self._accumulated = None
        if self._fresh is None:
            return None
        scattered = self.gather_group.size > 1
        if scattered:
            fresh, self._fresh = self._fresh, None
        else:
            fresh = self._own_fresh()
        trace.note(fresh, "unreduced" if scattered else "gradient")
        return fresh

    def zero_gradient(self) -> torch.Tensor:
        """This rank's share of a gradient that other ranks may have, and this one does not: it lands if any had."""
        self._doubtful = True
        zero = torch.zeros(self.whole_shape, dtype=self.dtype, device=self.local.device)
        trace.note(zero, "unreduced" if self.gather_group.size > 1 else "gradient")
        return zero

    @property
    def in_doubt(self) -> bool:
        """Whether a launch of this backward went without a gradient of this rank."""
        return self._doubtful

    def settle(self, arrived: bool) -> None:
        """What came of a gradient in doubt lands, if one ``arrived`` on any rank."""
        gradient, self._in_doubt, self._doubtful = self._in_doubt, None, False
        if gradient is not None and arrived:
            self.land(gradient)

    def drop(self) -> None:
        """Forgets what an aborted backward deposited, and what was accumulated unreduced."""
        self._fresh = self._in_doubt = None
        self._doubtful = False
        self.discard_accumulated()

    def discard_accumulated(self) -> None:
        """Forgets what earlier micro-batches left, unreduced."""
        if self.has_accumulated:
            self.parameter.grad = None
        self._accumulated = None

    def wide(self, gradient: torch.Tensor) -> bool:
        """Whether sums of ``gradient`` are taken in another precision than its own."""
        name = self.sharding.reduce_dtype
        return (str(self.parameter.dtype) if name is None else f"torch.{name}") != str(gradient.dtype)

    def new_gradient(self, whole: torch.Tensor) -> torch.Tensor:
        """Room for this rank's part of the reduced gradient."""
        dtype = self.parameter.dtype if self.wide(whole) else whole.dtype
        part = torch.empty(self.local.shape, dtype=dtype, device=whole.device)
        trace.note(part, "gradient")
        return part

    def widened(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in the stored parameter's element type."""
        if gradient.dtype != self.parameter.dtype:
            gradient = gradient.to(self.parameter.dtype)
            trace.note(gradient, "gradient")
        return gradient

    def land(self, gradient: torch.Tensor) -> None:
        """Adds the reduced gradient to ``.grad``, as hooks on the parameter leave it."""
        if self._doubtful:
            self._in_doubt = gradient if self._in_doubt is None else self._in_doubt.add_(gradient)
            return
        if self.divisor != 1:
            gradient.div_(self.divisor)
        parameter = cast(DTensor, self.parameter)
        # of the parameter's own spec: to make one costs ten times as much
        landed = hooks.before(parameter, DTensor(gradient, parameter._spec, requires_grad=False))
        if parameter.grad is None:
            parameter.grad = landed
        elif self.has_accumulated:
            raise RuntimeError(f"{self.name}: found a reduced gradient beside one that is accumulated unreduced")
        else:
            cast(DTensor, parameter.grad)._local_tensor.add_(landed._local_tensor)
        hooks.after(parameter)


def _compute_dtype(stored: torch.dtype, name: str | None) -> torch.dtype:
    """In which W is read: as stated for floating-point parameters; whole numbers stay what they are."""
    return stored if name is None or not stored.is_floating_point else getattr(torch, name)
