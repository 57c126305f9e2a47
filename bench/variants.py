"""The ways to run one MLP on n ranks that bench/linear.py compares: ours, torch's, megatron-core's, and no network.

Each holds the same weights and has the same interface: this rank's tokens in, this rank's tokens out. The first linear
is cut along its output features (column), the second along its input features (row). No biases; ReLU between, whose
result is all that the second linear needs too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright.comm.collectives import reduce_scatter
from shardwright.spec.mesh import chunk


@dataclass(frozen=True)
class Task:
    """The MLP and its data, whole and equal on every rank."""

    dense: nn.Sequential
    x: torch.Tensor
    upstream: torch.Tensor

    @classmethod
    def draw(cls, tokens: int, width: int, hidden: int) -> Task:
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False))
        return cls(dense, torch.randn(tokens, width), torch.randn(tokens, width))

    def weights(self, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's parts of the two weights."""
        first, second = self.dense[0].weight.detach(), self.dense[2].weight.detach()
        start, stop = chunk(first.shape[0], mesh.size(), mesh.get_local_rank())
        return first[start:stop].clone(), second[:, start:stop].clone()


@dataclass
class Variant:
    """One way to run the MLP. ``x`` and ``upstream`` are what this rank feeds forward and backward."""

    name: str
    family: str  # ours, torch, megatron or compute
    saves: str  # what backward keeps of the first linear's input: gathered, shard or –
    module: nn.Module
    x: torch.Tensor
    upstream: torch.Tensor
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    give_back: Callable[[], None] = field(default=lambda: None)  # lets go of what it keeps between steps

    def clear(self) -> None:
        """Forgets the gradients of the last step."""
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Forward, then backward; Y has arrived before, and every gradient when it returns."""
        with self.around():
            y = self.module(self.x)
            settled(y)
            y.backward(self.upstream)
            self.x.grad = settled(self.x.grad)

    def gradients(self) -> list[torch.Tensor]:
        """dX, dW of the first linear, dW of the second: this rank's parts."""
        return [settled(self.x.grad), *(settled(parameter.grad) for parameter in self.module.parameters())]


def settled(tensor: Any) -> torch.Tensor:
    """The plain local tensor, arrived."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def rows_of(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's tokens."""
    start, stop = chunk(whole.shape[0], mesh.size(), mesh.get_local_rank())
    return whole[start:stop].clone()


def every_variant(task: Task, mesh: DeviceMesh, chunks: int) -> tuple[list[Variant], list[str]]:
    """All that run here, and a line on each that does not."""
    made, missing = [compute_alone(task, mesh)], list[str]()
    for overlap in ("blocking", "async", "ring"):
        for saves in ("gathered", "shard"):
            try:
                made.append(ours(task, mesh, overlap, saves, chunks if overlap != "blocking" else 0))
            except sw.InputError as error:
                missing.append(f"{overlap}, {saves}: {error}")
    made += [torchs(task, mesh), torchs_with_our_reduction(task, mesh)]
    try:
        made.append(megatrons(task, mesh))
    except ImportError as error:
        missing.append(f"megatron-core: {error}")
    return made, missing


def compute_alone(task: Task, mesh: DeviceMesh) -> Variant:
    """The same local products on operands that are already here: no communication, so its sums are partial."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    for place, weight in zip((0, 2), task.weights(mesh), strict=True):
        module[place].weight = nn.Parameter(weight)
    return Variant("compute alone", "compute", "–", module, task.x.clone().requires_grad_(), task.upstream)


def ours(task: Task, mesh: DeviceMesh, overlap: str, saves: str, chunks: int) -> Variant:
    """GridLinear in one overlap mode."""
    column = sw.GridLayout(n=("tensor",), x="sharded", save_x=saves, overlap=overlap, chunks=chunks)
    row = sw.GridLayout(k=("tensor",), y="sharded", overlap=overlap, chunks=chunks)
    module = nn.Sequential(
        sw.GridLinear.from_dense(task.dense[0], column, mesh, "up"),
        nn.ReLU(),
        sw.GridLinear.from_dense(task.dense[2], row, mesh, "down"),
    )
    x, upstream = rows_of(task.x, mesh).requires_grad_(), rows_of(task.upstream, mesh)
    return Variant(overlap, "ours", saves, module, x, upstream)


def torchs(task: Task, mesh: DeviceMesh) -> Variant:
    """torch's tensor parallelism with tokens split between the blocks, as its documentation sets it up."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    for place in (0, 2):
        module[place].weight = nn.Parameter(task.dense[place].weight.detach().clone())
    styles = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(module, mesh, styles)
    x, upstream = rows_of(task.x, mesh).requires_grad_(), rows_of(task.upstream, mesh)
    return Variant("torch", "torch", "gathered", module, x, upstream)


def torchs_with_our_reduction(task: Task, mesh: DeviceMesh) -> Variant:
    """The same with our reduce-scatter in the place of gloo's, which is an all-reduce: what of a gain is owed to it?"""
    variant = torchs(task, mesh)
    group = sw.Runtime.of(mesh).group(("tensor",))

    def exchange(whole: torch.Tensor, op: str, scatter_dim: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert op == "sum" and scatter_dim == 0
        part = whole.new_empty(whole.shape[0] // group.size, *whole.shape[1:])
        reduce_scatter(settled(whole), part, group)
        return part

    def around() -> AbstractContextManager[Any]:
        return mock.patch("torch.distributed._functional_collectives.reduce_scatter_single", exchange)

    variant.name, variant.around = "torch + our reduce-scatter", around
    return variant


def megatrons(task: Task, mesh: DeviceMesh) -> Variant:
    """megatron-core's ColumnParallelLinear and RowParallelLinear with sequence parallelism, on the CPU."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # it asks for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=mesh.size(),
        sequence_parallel=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    (width, hidden), group = task.dense[2].weight.shape, mesh.get_group()
    shared: dict[str, Any] = {"config": config, "init_method": None, "bias": False, "tp_group": group}
    column = ColumnParallelLinear(width, hidden, gather_output=False, **shared)
    row = RowParallelLinear(hidden, width, input_is_parallel=True, skip_bias_add=False, **shared)
    for linear, weight in zip((column, row), task.weights(mesh), strict=True):
        linear.weight.data.copy_(weight)

    class FirstResult(nn.Module):
        """Its linears return (Y, bias)."""

        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    @contextmanager
    def around() -> Iterator[None]:
        with mock.patch("torch.cuda.current_device", lambda: "cpu"):
            yield

    parallel_state._set_global_memory_buffer()  # where it gathers to; it keeps it
    x, upstream = rows_of(task.x, mesh).requires_grad_(), rows_of(task.upstream, mesh)
    module = nn.Sequential(FirstResult(column), nn.ReLU(), FirstResult(row))
    give_back = parallel_state.get_global_memory_buffer().buffer.clear
    return Variant("megatron-core", "megatron", "shard", module, x, upstream, around, give_back)
