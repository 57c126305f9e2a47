"""The ways to train one Llama data parallel that bench/sharding.py compares: our levels, torch's DDP and FSDP2.

Each holds the same weights, takes this rank's sequences, and ends a step with torch's fused AdamW. Gradients are means
over ranks: ours divide the loss, since they are sums. ``blocking`` is our own level with nothing ahead of time and
nothing left under way: what the others' hidden share is measured against.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.comm.collectives import reduce_scatter
from shardwright.params.launches import Launch
from shardwright.params.reductions import Reductions


@dataclass(frozen=True)
class Task:
    """The model, equal on every rank, and this rank's sequences."""

    model: nn.Module
    ids: torch.Tensor

    @classmethod
    def draw(cls, layers: int, width: int, batch: int, sequence: int) -> Task:
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            vocab_size=2048,
            max_position_embeddings=sequence,
            use_cache=False,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        return cls(model, torch.randint(0, 2048, (batch, sequence), generator=generator))


@dataclass
class Variant:
    """One way to train. ``scale`` multiplies the loss."""

    name: str
    family: str  # ours, blocking, torch or compute
    module: nn.Module
    ids: torch.Tensor
    scale: float = 1.0
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    level: str = ""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)

    def clear(self) -> None:
        """Nothing is left of a step."""

    def gradients(self) -> list[torch.Tensor]:
        """Forward and backward; every gradient whole, in the model's order; then forgets them."""
        self._pass()
        found = []
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found.append(whole.clone())
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _pass(self) -> None:
        with self.around():
            loss = self.module(input_ids=self.ids, labels=self.ids).loss
            (loss * self.scale).backward()

    def step(self) -> None:
        """Forward, backward, optimizer."""
        self._pass()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


LEVELS: dict[str, dict[str, Any]] = {
    "replicate": {"level": "replicate"},
    "optimizer": {"level": "optimizer"},
    "gradients": {"level": "gradients"},
    "parameters": {"level": "parameters"},
    "parameters, kept": {"level": "parameters", "keep": True},
}


def every_variant(task: Task, mesh: DeviceMesh) -> list[Variant]:
    """All of them, each with a model of its own."""
    made = [Variant("compute alone", "compute", copy.deepcopy(task.model), task.ids)]
    for name, settings in LEVELS.items():
        made.append(ours(task, mesh, name, settings))
        made.append(ours(task, mesh, name, settings | {"in_flight": 1}, blocking=True))
    return [*made, ddp(task), fsdp2(task, mesh), fsdp2_with_our_reduction(task, mesh)]


def ours(task: Task, mesh: DeviceMesh, name: str, settings: dict[str, Any], blocking: bool = False) -> Variant:
    """Our store at one level."""
    module = sw.shard(copy.deepcopy(task.model), mesh, **settings)
    family = "blocking" if blocking else "ours"
    around = at_once if blocking else nullcontext
    return Variant(name, family, module, task.ids, 1 / mesh.size(), around, name)


@contextmanager
def at_once() -> Iterator[None]:
    """Reductions are waited for where they are issued."""
    issue = Reductions._issue

    def issue_and_wait(self: Reductions, launch: Launch) -> None:
        issue(self, launch)
        while self._moving:
            self._step_all()

    with mock.patch.object(Reductions, "_issue", issue_and_wait):
        yield


def ddp(task: Task) -> Variant:
    """torch's DistributedDataParallel as it comes."""
    return Variant("DDP", "torch", DistributedDataParallel(copy.deepcopy(task.model)), task.ids)


def fsdp2(task: Task, mesh: DeviceMesh) -> Variant:
    """torch's fully_shard: every block, then the root."""
    module: Any = copy.deepcopy(task.model)
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return Variant("FSDP2", "torch", module, task.ids)


class _Exchange:
    """Our reduce-scatter as FSDP2 takes one."""

    def __init__(self, mesh: DeviceMesh):
        self.group = sw.Runtime.of(mesh).group(mesh.mesh_dim_names or ())

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        reduce_scatter(input_tensor.view(self.group.size, -1), output_tensor.view(1, -1), self.group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self.group.size)


def fsdp2_with_our_reduction(task: Task, mesh: DeviceMesh) -> Variant:
    """The same with our exchange in the place of gloo's reduce-scatter, which is an all-reduce."""
    variant = fsdp2(task, mesh)
    module: Any = variant.module
    for part in [*module.model.layers, module]:
        part.set_custom_reduce_scatter(_Exchange(mesh))
    variant.name = "FSDP2 + our reduce-scatter"
    return variant
