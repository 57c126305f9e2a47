"""What stands on an edge where the layout that one site leaves is not the one that the next takes.

T tokens of one place on the m axes, F' features of one rank, g ranks. The gradient lies as the value does, so backward
makes each step the other way round.

| step         | in             | out            | forward sends       | backward sends      |
|--------------|----------------|----------------|---------------------|---------------------|
| gather       | [T/g, F']      | [T, F']        | (1−1/g)·T·F'        | –                   |
| slice        | [T, F']        | [T/g, F']      | –                   | (1−1/g)·T·F'        |
| to-features  | [T/g, F'·g]    | [T, F']        | (1−1/g)·T·F'        | (1−1/g)·T·F'        |
| to-tokens    | [T, F']        | [T/g, F'·g]    | (1−1/g)·T·F'        | (1−1/g)·T·F'        |

The last two are one all-to-all each way: 1/g of what a gather and a slice would move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.comm import AxisGroup, Runtime, all_gather
from shardwright.linear.heads import HeadExchange
from shardwright.site import Step


class Conversion:
    """The steps of one edge, over the groups of ``runtime``. name: of the site that they are made for."""

    def __init__(self, steps: Sequence[Step], runtime: Runtime, name: str):
        self.steps = [(step.kind, runtime.group(step.axes), runtime.group(step.within)) for step in steps]
        self.name = name

    def __call__(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """x [R,F] as the site before leaves it → as the next takes it. rows: T."""
        for kind, group, within in self.steps:
            if group.size == 1:
                continue
            start, stop = within.bounds(rows)
            exchange = HeadExchange(group, 1, self.name)
            if kind == "gather":
                x = _Gather.apply(x, stop - start, group, self.name)
            elif kind == "slice":
                x = _Slice.apply(x, group, self.name)
            elif kind == "to-features":
                x = exchange.to_heads(x, stop - start)
            else:
                x = exchange.to_tokens(x)
        return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int, group: AxisGroup, name: str) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, rows, group, name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _own(grads[0], ctx.group), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: AxisGroup, name: str) -> torch.Tensor:
        ctx.rows, ctx.group, ctx.name = x.shape[0], group, name
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _gathered(grads[0], ctx.rows, ctx.group, ctx.name), None, None


def _gathered(x: torch.Tensor, rows: int, group: AxisGroup, name: str) -> torch.Tensor:
    whole = x.new_empty(rows, x.shape[1])
    all_gather(x, whole, group, name)
    return whole


def _own(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """A copy: a view would pin the whole."""
    return x[slice(*group.bounds(x.shape[0]))].clone()
