"""The same step on a CUDA device, by NCCL, on one rank (conftest leaves these out where there is none)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.runtime.arena import Arena
from support import tiny
from support.ranks import on_ranks


def on_device(device: str, layout: str, steps: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    plan = tiny.plan_of({"data": 1, "tensor": 1}, layout, backend="nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("data", "tensor"))
    model = sw.parallelize(build_meta(load_config(tiny.config_path()), plan.dtype), mesh, plan)
    step = sw.TrainStep(model, mesh, plan)
    batches = [[(ids.to(device), labels.to(device)) for ids, labels in micro] for micro in tiny.batches(plan, steps)]
    return [step(micro).item() for micro in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["sequence-parallel", "sequence-parallel-async", "sequence-parallel-ring"])
def test_a_cuda_step_is_a_cpu_step(layout):
    (cpu,), (cuda,) = (on_ranks(1, on_device, device, layout, 5) for device in ("cpu", "cuda"))
    assert cuda[0] == pytest.approx(cpu[0], rel=1e-4)


def lease_and_release() -> list[int]:
    arena, device = Arena(), torch.device("cuda")
    before = torch.cuda.memory_allocated()
    tensor = arena.lease((1024, 1024), torch.float32, device, "gathered", "x")
    held = torch.cuda.memory_allocated() - before
    arena.end(tensor)
    return [held, torch.cuda.memory_allocated() - before]


@pytest.mark.gpu
def test_released_leases_come_free_on_the_device():
    assert on_ranks(1, lease_and_release) == [[4 * 2**20, 0]]


def bucket_and_flush() -> list[int]:
    """Bytes allocated, and reserved once what is free is given back: before, with a filled bin, after it has landed."""
    from torch.distributed.device_mesh import init_device_mesh

    from shardwright.runtime import bin_reduction
    from shardwright.runtime.bin import Bin, BinPiece
    from shardwright.runtime.runtime import Runtime

    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("data",))
    group = Runtime.of(mesh, "nccl").group(("data",))
    alone = replace(group, process_group=torch.distributed.new_group(backend="nccl"))
    arena, device = Arena(), torch.device("cuda")
    gradients = [torch.full((1000,), float(i), device=device) for i in range(8)]
    destinations = [torch.zeros_like(gradient) for gradient in gradients]
    torch.distributed.all_reduce(torch.ones(1, device=device), group=alone.process_group)  # NCCL takes its own memory
    found = [*_memory()]
    for handle in (bin_reduction.BinOnNccl, bin_reduction.BinAllReduce):
        full = Bin("", None, arena.lease((1, 2**20), torch.float32, device, "bucket", "bucket"))
        for gradient, destination in zip(gradients, destinations, strict=True):
            full.take(gradient, BinPiece(1000, destination, None))
        held = _memory()[0] - found[0]
        handle(full, alone, arena).finish(True)
        del full
        found += [held, *_memory()]
    assert [destination.unique().tolist() for destination in destinations] == [[2.0 * i] for i in range(8)]
    return found


def _memory() -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.gpu
def test_a_bin_that_has_landed_leaves_nothing_on_the_device():
    ((allocated, reserved, *rest),) = on_ranks(1, bucket_and_flush)
    assert rest == [4 * 2**20, allocated, reserved] * 2
