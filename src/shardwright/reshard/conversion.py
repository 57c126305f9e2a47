"""What stands on an edge where the layout that one site leaves is not the one that the next takes.

T tokens, F features of what the other axes leave of them, g ranks. The gradient lies as the value does, so backward
makes each step the other way round.

| step            | in             | out            | forward sends       | backward sends      |
|-----------------|----------------|----------------|---------------------|---------------------|
| gather          | [T/g, F]       | [T, F]         | (1−1/g)·T·F         | –                   |
| slice           | [T, F]         | [T/g, F]       | –                   | (1−1/g)·T·F         |
| gather-features | [T, F/g]       | [T, F]         | (1−1/g)·T·F         | –                   |
| slice-features  | [T, F]         | [T, F/g]       | –                   | (1−1/g)·T·F         |
| to-features     | [T/g, F]       | [T, F/g]       | (1−1/g)·T·F/g       | (1−1/g)·T·F/g       |
| to-tokens       | [T, F/g]       | [T/g, F]       | (1−1/g)·T·F/g       | (1−1/g)·T·F/g       |

The last two are one all-to-all each way: 1/g of what a gather and a slice would move. Parts of features travel as rows
of the transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.comm.all_to_all import columns_to_rows, rows_to_columns
from shardwright.comm.collectives import all_gather
from shardwright.comm.groups import AxisGroup
from shardwright.runtime.runtime import Runtime
from shardwright.spec.edge import Step


class Conversion:
    """The steps of one edge, over the groups of ``runtime``.

    width: features of the whole activation. name: of the site that they are made for.
    """

    def __init__(self, steps: Sequence[Step], runtime: Runtime, width: int, name: str):
        self.steps = [
            (step.kind, runtime.group(step.axes), runtime.group(step.tokens), runtime.group(step.features))
            for step in steps
        ]
        self.width, self.name = width, name

    def __call__(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """x [R,F'] as the site before leaves it → as the next takes it. rows: tokens of one place on the batch axes."""
        for kind, group, tokens, features in self.steps:
            if group.size == 1:
                continue
            (first, last), (start, stop) = tokens.bounds(rows), features.bounds(self.width)
            make = _MAKE[kind]
            x = _Step.apply(x, make, _MAKE[_BACK[kind]], (last - first, stop - start), group, self.name)
        return x


_BACK = {
    "gather": "slice",
    "slice": "gather",
    "gather-features": "slice-features",
    "slice-features": "gather-features",
    "to-features": "to-tokens",
    "to-tokens": "to-features",
}
"""Each step, the other way round."""


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, make: Any, back: Any, whole: tuple[int, int], group: AxisGroup, name: str
    ) -> torch.Tensor:
        ctx.back, ctx.context = back, (whole, group, name)
        found: torch.Tensor = make(x, whole, group, name)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.back(grads[0].contiguous(), *ctx.context), None, None, None, None, None


# Each takes x and the [T,F] that the step's ranks share.


def _gather(x: torch.Tensor, whole: tuple[int, int], group: AxisGroup, name: str) -> torch.Tensor:
    found = x.new_empty(whole[0], x.shape[1])
    all_gather(x, found, group, name)
    return found


def _slice(x: torch.Tensor, whole: tuple[int, int], group: AxisGroup, name: str) -> torch.Tensor:
    return x[slice(*group.bounds(whole[0]))].clone()  # a view would pin the whole


def _gather_features(x: torch.Tensor, whole: tuple[int, int], group: AxisGroup, name: str) -> torch.Tensor:
    return _gather(x.t().contiguous(), whole[::-1], group, name).t().contiguous()


def _slice_features(x: torch.Tensor, whole: tuple[int, int], group: AxisGroup, name: str) -> torch.Tensor:
    return x[:, slice(*group.bounds(whole[1]))].clone(memory_format=torch.contiguous_format)


def _to_features(x: torch.Tensor, whole: tuple[int, int], group: AxisGroup, name: str) -> torch.Tensor:
    return rows_to_columns(x, whole[0], 1, group, name)


def _to_tokens(x: torch.Tensor, whole: tuple[int, int], group: AxisGroup, name: str) -> torch.Tensor:
    return columns_to_rows(x, whole[1], 1, group, name)


_MAKE = {
    "gather": _gather,
    "slice": _slice,
    "gather-features": _gather_features,
    "slice-features": _slice_features,
    "to-features": _to_features,
    "to-tokens": _to_tokens,
}
