"""What tests of untidy programs share: a sharded module, an error in a line, a block with side losses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from support import dense
from support.nets import LEVELS

WORLD = 2
SPLIT = [name for name in LEVELS if name != "replicate"]


def mesh_of_all():
    return dense.mesh_of(data=dist.get_world_size())


def sharded(module, level, **options):
    return sw.shard(module, mesh_of_all(), **(LEVELS[level] | options))


def message_of(function, *args):
    """The error that ``function`` raises, as one line; empty if it raises none."""
    try:
        function(*args)
    except (RuntimeError, ValueError, sw.InputError) as error:
        text = str(error)
        assert "\n" not in text and len(text) <= 300, text
        return f"{type(error).__name__}: {text}"
    return ""


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)
        self.scale = nn.Parameter(torch.rand(width))
        self.aux = None

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        self.aux = (self.up(y) @ self.down.weight.T * self.scale.sum()).square().mean() + (
            y * self.scale
        ).square().mean()
        return y
