"""Attention between two sites whose tokens are split: heads are exchanged for tokens, and back.

A site of q, k, v that scatters Y over k axes leaves each rank some rows of its heads. Attention needs whole sequences,
so those axes split heads instead while it is at work: queries, keys and values are whole sequences of fewer heads, and
positions and the causal mask are those of one rank.

| where           | in                       | all-to-all over g ranks | out                      |
|-----------------|--------------------------|-------------------------|--------------------------|
| after q, k, v   | [T/g, heads/n · d]       | (1−1/g) of it sent      | [T, heads/(n·g) · d]     |
| before o        | [T, heads/(n·g) · d]     | (1−1/g) of it sent      | [T/g, heads/n · d]       |

Backward makes each the other way round: eight exchanges a block in a step, where gathering K and V instead would move
g/2 times as much for as many K/V heads as heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm import AxisGroup
from shardwright.comm.all_to_all import columns_to_rows, rows_to_columns


@dataclass(frozen=True)
class HeadExchange:
    """Over ``group`` (of more than one rank), in units of one head's ``unit`` features; name: for the trace."""

    group: AxisGroup
    unit: int
    name: str

    def to_heads(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        """y [T_own, F'] of T = ``rows`` → [T, F'/g], differentiable."""
        found: torch.Tensor = _ToHeads.apply(y, rows, self)
        return found

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, F'/g], of features that divide → [T_own, F'], differentiable."""
        found: torch.Tensor = _ToTokens.apply(x, x.shape[1] * self.group.size, self)
        return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, rows: int, exchange: HeadExchange) -> torch.Tensor:
        ctx.width, ctx.exchange = y.shape[1], exchange
        return rows_to_columns(y, rows, exchange.unit, exchange.group, exchange.name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        grad = grads[0].contiguous()
        return columns_to_rows(grad, ctx.width, exchange.unit, exchange.group, exchange.name), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, exchange: HeadExchange) -> torch.Tensor:
        ctx.rows, ctx.exchange = x.shape[0], exchange
        return columns_to_rows(x.contiguous(), width, exchange.unit, exchange.group, exchange.name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        return rows_to_columns(grads[0], ctx.rows, exchange.unit, exchange.group, exchange.name), None, None
