"""The reduction of partial sums Y over the k axes, as an autograd node of its own (a replay can stop before it).

| word         | forward                       | backward                         |
|--------------|-------------------------------|----------------------------------|
| `sharded`    | Y [R,N] → reduce-scatter [R/n,N] | dY [R/n,N] → all-gather [R,N] |
| `replicated` | Y [R,N] → all-reduce, in place | dY [R,N] as it is                |
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.comm.groups import AxisGroup
from shardwright.comm.runtime import Runtime
from shardwright.mesh import chunk


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, runtime: Runtime, group: AxisGroup, owner: str, wide: bool
    ) -> torch.Tensor:
        rows, width = partial.shape
        ctx.runtime, ctx.group, ctx.owner, ctx.rows = runtime, group, owner, rows
        start, stop = chunk(rows, group.size, group.index)
        part = partial.new_empty(stop - start, width)
        reduce_scatter(partial, part, group, owner, wide)
        runtime.arena.end(partial)
        return part

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad,) = grads
        # The node that made the partial sums ends this lease when its products are done.
        whole = ctx.runtime.arena.lease(
            (ctx.rows, grad.shape[1]), grad.dtype, grad.device, "gathered", f"{ctx.owner} (dY)"
        )
        all_gather(grad, whole, ctx.group, ctx.owner)
        return whole, None, None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, runtime: Runtime, group: AxisGroup, owner: str, wide: bool
    ) -> torch.Tensor:
        all_reduce(partial, group, owner, wide)
        runtime.arena.give(partial)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return grads[0], None, None, None, None


def reduce_output(
    partial: torch.Tensor, runtime: Runtime, group: AxisGroup, word: str, owner: str, wide: bool = False
) -> torch.Tensor:
    """The sum over ``group`` of partial [R,N]: this rank's rows [R/n,N] (`sharded`), or all of it (`replicated`).

    wide: low-precision sums are taken in fp32.
    """
    if group.size == 1:
        return partial
    node = _ReduceScatter if word == "sharded" else _AllReduce
    reduced: torch.Tensor = node.apply(partial, runtime, group, owner, wide)
    return reduced
