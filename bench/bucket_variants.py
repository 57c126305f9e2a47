"""The ways to train a model of many small parameters that bench/bucket.py compares: our store with and without bucket,
torch's DDP and FSDP2, fairscale's FSDP.

Each holds the same weights and ends a step with torch's fused AdamW. Gradients are means over ranks: ours divide the
loss, since they are sums.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fairscale_on_cpu import Sharded, on_cpu
from sharding_variants import Variant
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw

SMALL = 25
"""Norms and biases of a block."""


class Block(nn.Module):
    """A matrix, then norms and biases in turn: rows [tokens, width] → [tokens, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.matrix = nn.Linear(width, width, bias=False)
        self.small = nn.ParameterList(nn.Parameter(torch.rand(width) + 0.5) for _ in range(SMALL))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.matrix(rows)
        for place, parameter in enumerate(self.small):
            norm = place % 2 == 0
            out = nn.functional.rms_norm(out, parameter.shape, parameter) if norm else out + parameter
        return rows + out


@dataclass(frozen=True)
class Task:
    """The model, equal on every rank, and this rank's rows."""

    model: nn.Module
    rows: torch.Tensor

    @classmethod
    def draw(cls, blocks: int, width: int, tokens: int) -> Task:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        return cls(model, torch.randn(tokens, width, generator=generator))


class Way(Variant):
    """One way to train on rows; ``ids`` are the rows."""

    def _pass(self) -> None:
        with self.around():
            (self.module(self.ids).square().mean() * self.scale).backward()


class Fairscale(Way):
    """Its parameters are flat: one a block, split evenly over the ranks and padded."""

    shapes: list[torch.Size]

    def gradients(self) -> list[torch.Tensor]:
        """Forward and backward; every gradient whole, in the model's order; then forgets them."""
        self._pass()
        flat = []
        for module in self.module.modules():
            if isinstance(module, Sharded):
                for parameter in module.params:
                    whole = torch.empty(dist.get_world_size(), *parameter.grad.shape)
                    dist.all_gather_into_tensor(whole.view(-1), parameter.grad)
                    flat.append(whole.view(-1)[: parameter._orig_size.numel()])
        self.optimizer.zero_grad(set_to_none=True)
        sizes = [shape.numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(torch.cat(flat).split(sizes), self.shapes, strict=True)]


def every_variant(task: Task, mesh: DeviceMesh, caps: list[str]) -> list[Variant]:
    """All of them, each with a model of its own. caps: of our bucket, "0" for none."""
    made: list[Variant] = [Way("compute alone", "compute", copy.deepcopy(task.model), task.rows)]
    made += [ours(task, mesh, cap) for cap in caps]
    made.append(ours(task, mesh, "1MiB", keep=True))
    return [*made, ddp(task), fsdp2(task, mesh), fairscale(task)]


def ours(task: Task, mesh: DeviceMesh, cap: str, keep: bool = False) -> Variant:
    """Our store at level ``parameters``. keep: W is gathered once a step, so as many bytes travel as DDP's."""
    module = sw.shard(copy.deepcopy(task.model), mesh, "parameters", bucket=cap, keep=keep)
    name = f"ours, cap {cap}{', kept' if keep else ''}"
    return Way(name, "ours", module, task.rows, 1 / mesh.size(), nullcontext, cap)


def ddp(task: Task) -> Variant:
    """torch's DistributedDataParallel as it comes: buckets of 25 MiB."""
    return Way("DDP", "peer", DistributedDataParallel(copy.deepcopy(task.model)), task.rows)


def fsdp2(task: Task, mesh: DeviceMesh) -> Variant:
    """torch's fully_shard: every block, then the root."""
    module: Any = copy.deepcopy(task.model)
    for block in [*module, module]:
        fully_shard(block, mesh=mesh)
    return Way("FSDP2", "peer", module, task.rows)


def fairscale(task: Task) -> Variant:
    """fairscale's FullyShardedDataParallel: every block, then the root; its bucket of 25 MiB."""
    inner = nn.Sequential(*(Sharded(copy.deepcopy(block)) for block in task.model.children()))
    variant = Fairscale("fairscale FSDP", "peer", Sharded(inner), task.rows, around=on_cpu)
    variant.shapes = [parameter.shape for parameter in task.model.parameters()]
    return variant
