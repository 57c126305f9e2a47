"""The reduction of partial sums Y over the k axes, as an autograd node of its own (a replay can stop before it).

| words of Y over k                | forward                                          | backward                      |
|----------------------------------|--------------------------------------------------|-------------------------------|
| `sharded`                        | Y [R,N] → reduce-scatter [R/n,N]                 | dY [R/n,N] → all-gather [R,N] |
| `sharded-features`               | Y [R,N] → reduce-scatter [R,N/n], as rows of Yᵀ  | dY [R,N/n] → all-gather [R,N] |
| `replicated`                     | Y [R,N] → all-reduce, in place                   | dY [R,N] as it is             |
| one of the first two, and the last | reduce-scatter, then all-reduce of the part    | all-gather                    |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.comm.groups import AxisGroup
from shardwright.runtime.runtime import Runtime


@dataclass(frozen=True)
class Reduction:
    """How partial sums [R,N] end.

    scatter: over these ranks each keeps a part (by_features: of the features, else of the rows); reduce: over these the
    part is all-reduced. owner: for the trace. wide: low-precision sums are taken in fp32.
    """

    runtime: Runtime
    scatter: AxisGroup
    by_features: bool
    reduce: AxisGroup
    owner: str
    wide: bool = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to sum up."""
        return self.scatter.size > 1 or self.reduce.size > 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of the leased partial [R,N], without autograd; ends its lease."""
        total = partial
        if self.scatter.size > 1:
            whole = partial.t() if self.by_features else partial
            start, stop = self.scatter.bounds(whole.shape[0])
            part = whole.new_empty(stop - start, whole.shape[1])
            reduce_scatter(whole, part, self.scatter, self.owner, self.wide)
            self.runtime.arena.end(partial)
            total = transposed(part) if self.by_features else part
        if self.reduce.size > 1:
            all_reduce(total, self.reduce, self.owner, self.wide)
        return self.runtime.arena.give(total)

    def gather(self, part: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """dY [R,N] of ``shape`` from every rank's part, leased; the part itself where nothing was scattered."""
        if self.scatter.size == 1:
            return part
        shape = shape[::-1] if self.by_features else shape
        owner = f"{self.owner} (dY)"
        whole = self.runtime.arena.lease(shape, part.dtype, part.device, "gathered", owner)
        all_gather(transposed(part) if self.by_features else part, whole, self.scatter, self.owner)
        return whole.t() if self.by_features else whole


def transposed(part: torch.Tensor) -> torch.Tensor:
    """A copy of a part as its transpose, contiguous: features travel as rows."""
    return part.t().clone(memory_format=torch.contiguous_format)


def lease_partial(
    runtime: Runtime, shape: tuple[int, int], like: torch.Tensor, owner: str, by_features: bool
) -> torch.Tensor:
    """Room for a partial sum [R,N], which lies as its transpose where features are scattered."""
    shape = shape[::-1] if by_features else shape
    partial = runtime.arena.lease(shape, like.dtype, like.device, "unreduced", owner)
    return partial.t() if by_features else partial


class _Scatter(torch.autograd.Function):
    """Where parts are kept: the result is another tensor."""

    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, reduction: Reduction, ahead: Callable[[], None] | None
    ) -> torch.Tensor:
        ctx.reduction, ctx.shape, ctx.ahead = reduction, tuple(partial.shape), ahead
        return reduction.sum(partial)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        if ctx.ahead is not None:
            ctx.ahead()
        # The node that made the partial sums ends this lease when its products are done.
        return ctx.reduction.gather(grad, ctx.shape), None, None


class _AllReduce(torch.autograd.Function):
    """Where nothing is scattered: in place."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        ctx.mark_dirty(partial)
        return reduction.sum(partial)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def reduce_output(partial: torch.Tensor, reduction: Reduction, ahead: Callable[[], None] | None = None) -> torch.Tensor:
    """The sum of partial [R,N], as ``reduction`` says. ahead: called in backward before dY is gathered."""
    if not reduction.needed:
        return partial
    if reduction.scatter.size > 1:
        reduced: torch.Tensor = _Scatter.apply(partial, reduction, ahead)
    else:
        reduced = _AllReduce.apply(partial, reduction)
    return reduced
