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


def reduce_rows(
    partial: torch.Tensor, runtime: Runtime, group: AxisGroup, word: str, owner: str, wide: bool
) -> torch.Tensor:
    """The sum over ``group`` of the leased partial [R,N], without autograd; ends its lease."""
    if group.size == 1:
        return partial
    if word == "replicated":
        all_reduce(partial, group, owner, wide)
        return runtime.arena.give(partial)
    rows, width = partial.shape
    start, stop = chunk(rows, group.size, group.index)
    part = partial.new_empty(stop - start, width)
    reduce_scatter(partial, part, group, owner, wide)
    runtime.arena.end(partial)
    return part


def gather_rows(part: torch.Tensor, rows: int, runtime: Runtime, group: AxisGroup, owner: str) -> torch.Tensor:
    """dY [rows,N] of every rank's rows, leased."""
    shape = (rows, part.shape[1])
    whole = runtime.arena.lease(shape, part.dtype, part.device, "gathered", f"{owner} (dY)")
    all_gather(part, whole, group, owner)
    return whole


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, runtime: Runtime, group: AxisGroup, owner: str, wide: bool
    ) -> torch.Tensor:
        ctx.runtime, ctx.group, ctx.owner, ctx.rows = runtime, group, owner, partial.shape[0]
        return reduce_rows(partial, runtime, group, "sharded", owner, wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad,) = grads
        # The node that made the partial sums ends this lease when its products are done.
        return gather_rows(grad, ctx.rows, ctx.runtime, ctx.group, ctx.owner), None, None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, runtime: Runtime, group: AxisGroup, owner: str, wide: bool
    ) -> torch.Tensor:
        ctx.mark_dirty(partial)
        return reduce_rows(partial, runtime, group, "replicated", owner, wide)

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
