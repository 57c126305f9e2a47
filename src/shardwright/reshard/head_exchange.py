"""Attention between two sites whose tokens are split: heads are exchanged for tokens, and back.

Each rank has some rows of its heads: of a site of q, k, v that scatters Y over k axes, or where m axes split sequences
because the batch does not fill them. Attention needs whole sequences, so those axes split heads instead while it is at
work: queries, keys and values are whole sequences of fewer heads, and positions and the causal mask are those of one
rank. Key/value heads that cannot be cut as the queries' are gathered, and each rank keeps those that its queries read.

| where                | in                   | over g ranks                      | out                  |
|----------------------|----------------------|-----------------------------------|----------------------|
| after q, k, v        | [T/g, heads/n · d]   | all-to-all: (1−1/g) of it sent    | [T, heads/(n·g) · d] |
| after k, v, gathered | [T/g, heads/n · d]   | all-gather: (g−1) times it sent   | [T, kept heads · d]  |
| before o             | [T, heads/(n·g) · d] | all-to-all: (1−1/g) of it sent    | [T/g, heads/n · d]   |

Backward makes each the other way round (a reduce-scatter where heads were gathered): eight exchanges a block in a step,
where gathering K and V instead would move g/2 times as much for as many K/V heads as heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm.all_to_all import columns_to_rows, rows_to_columns
from shardwright.comm.collectives import all_gather, reduce_scatter
from shardwright.comm.groups import AxisGroup


@dataclass(frozen=True)
class HeadExchange:
    """``heads`` of ``unit`` features each, cut over ``group`` (of more than one rank); name: for the trace."""

    group: AxisGroup
    unit: int
    heads: int
    name: str

    def to_heads(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        """y [T_own, heads·unit] of T = ``rows`` → [T, this rank's heads·unit], differentiable."""
        found: torch.Tensor = _Exchange.apply(y, rows, self, True)
        return found

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's heads·unit] → [T_own, heads·unit], differentiable."""
        found: torch.Tensor = _Exchange.apply(x, self.heads * self.unit, self, False)
        return found


@dataclass(frozen=True)
class HeadGather:
    """The same for heads that cannot be cut as those of the queries: all come, each rank keeps those it reads.

    queries: how many heads they have before the exchange, a multiple of ``heads``.
    """

    group: AxisGroup
    unit: int
    heads: int
    queries: int
    name: str

    def to_heads(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        """y [T_own, heads·unit] of T = ``rows`` → [T, kept heads·unit], differentiable."""
        found: torch.Tensor = _GatherHeads.apply(y, rows, self)
        return found

    def kept(self) -> list[slice]:
        """The columns of the heads that this rank's queries read, in order; one for each query where some are read more
        often than others."""
        wanted = [query * self.heads // self.queries for query in range(*self.group.bounds(self.queries))]
        distinct = sorted(set(wanted))
        each = len(wanted) // len(distinct)
        heads = distinct if wanted == [head for head in distinct for _ in range(each)] else wanted
        return [slice(head * self.unit, (head + 1) * self.unit) for head in heads]


class _Exchange(torch.autograd.Function):
    """An all-to-all that splits heads instead of tokens, or tokens instead of heads; each is the other's backward.

    other: what the exchange makes whole again, all rows T on the way to heads, all columns on the way to tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: int, exchange: HeadExchange, to_heads: bool) -> torch.Tensor:
        ctx.other, ctx.exchange, ctx.to_heads = x.shape[1 if to_heads else 0], exchange, to_heads
        return _exchanged(x, other, exchange, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _exchanged(grads[0], ctx.other, ctx.exchange, not ctx.to_heads), None, None, None


def _exchanged(x: torch.Tensor, other: int, exchange: HeadExchange, to_heads: bool) -> torch.Tensor:
    if to_heads:
        return rows_to_columns(x, other, exchange.unit, exchange.group, exchange.name)
    return columns_to_rows(x.contiguous(), other, exchange.unit, exchange.group, exchange.name)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, rows: int, heads: HeadGather) -> torch.Tensor:
        ctx.shape, ctx.own, ctx.heads = (rows, y.shape[1]), y.shape[0], heads
        whole = y.new_empty(ctx.shape)
        all_gather(y, whole, heads.group, heads.name)
        return torch.cat([whole[:, columns] for columns in heads.kept()], 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        heads = ctx.heads
        whole, part = grads[0].new_zeros(ctx.shape), grads[0].new_empty(ctx.own, ctx.shape[1])
        for columns, grad in zip(heads.kept(), grads[0].split(heads.unit, 1), strict=True):
            whole[:, columns] += grad
        reduce_scatter(whole, part, heads.group, heads.name)
        return part, None, None
