"""Recomputed methods of sharded modules: a replay that calls no module sees W, and nobody else does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from support import dense
from support.nets import LEVELS
from support.ranks import on_ranks


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wanted):
        ctx.wanted = wanted
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.wanted:
            raise ZeroDivisionError
        return gradient, None


class Block(nn.Module):
    """Reads its own parameters in a method that is computed again in backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))
        self.fails = False

    def _inner(self, x):
        return torch.tanh(Fails.apply(x, self.fails) @ self.linear.weight * self.scale) * self.scale

    def forward(self, x):
        return x + checkpoint(self._inner, self.linear(x), use_reentrant=False)


def make():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def clean(model):
    """Whether every module has its own DTensors, as outside of forward and backward."""
    modules = list(model.modules())
    return all(isinstance(each, DTensor) for module in modules for each in module._parameters.values()) and not any(
        key in module.__dict__ for module in modules for key in module._parameters
    )


def replayed(level):
    """(errors of the gradients of three backwards, whether modules are clean after each, and after one that failed)."""
    model, plain = sw.shard(make(), dense.mesh_of(data=2), **LEVELS[level]), make()
    errors, states = [], []
    for step in range(3):
        x, up = dense.random(2, 4, 6, seed=step), dense.random(2, 4, 6, seed=9 + step)
        model[1].fails = step == 1
        y = model(x[dist.get_rank()])
        if step == 1:
            with pytest.raises(ZeroDivisionError):
                y.backward(up[dist.get_rank()])
            states.append(clean(model))
            model[1].fails = False
            model.zero_grad()
            y = model(x[dist.get_rank()])
        states.append(clean(model))
        y.backward(up[dist.get_rank()])
        states.append(clean(model))
        plain(x).backward(up)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        errors += [dense.error(a.grad.full_tensor(), b.grad) for a, b in pairs]
        model.zero_grad()
        plain.zero_grad()
    return max(errors), states


@pytest.mark.parametrize("level", LEVELS)
def test_a_method_is_computed_again(level):
    """Also after a backward in which an exception was raised, after which modules hold their DTensors at once."""
    for error, states in on_ranks(2, replayed, level):
        assert error <= 1e-12
        assert states == [True] * 7
