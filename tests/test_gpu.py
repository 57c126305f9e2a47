"""The same step on a CUDA device, by NCCL, on one rank (conftest leaves these out where there is none)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.runtime.arena import Arena
from support import tiny
from support.ranks import on_ranks

STEPS = 5


def on_device(device: str, layout: str) -> tuple[list[float], dict[str, float]]:
    """(losses of five steps; how far each gradient is, in the first of them, from the plain model's in float64)."""
    from torch.distributed.device_mesh import init_device_mesh

    plan = tiny.plan_of({"data": 1, "tensor": 1}, layout, backend="nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("data", "tensor"))
    config = load_config(tiny.config_path())
    model = sw.parallelize(build_meta(config, plan.dtype), mesh, plan)
    micro_batches = tiny.batches(plan, STEPS)
    ((ids, labels), *_), *_ = micro_batches
    expected = plain_gradients(config, model, ids, labels)
    targets = labels.to(device)
    model(input_ids=ids.to(device), labels=targets, shift_labels=targets).loss.backward()
    found = {name: parameter.grad.full_tensor().cpu().double() for name, parameter in model.named_parameters()}
    errors = {name: ((found[name] - dense).norm() / dense.norm()).item() for name, dense in expected.items()}
    model.zero_grad()
    step = sw.TrainStep(model, mesh, plan)
    placed = [[(ids.to(device), labels.to(device)) for ids, labels in micro] for micro in micro_batches]
    return [step(micro).item() for micro in placed], errors


def plain_gradients(config: Any, model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of Hugging Face's own model with the values of ``model``, on the CPU in float64."""
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    values = {name: parameter.full_tensor().detach().cpu().double() for name, parameter in model.named_parameters()}
    plain.load_state_dict(values, strict=False)
    logits = plain(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if name in values}


LAYOUTS = ["replicate", "sequence-parallel", "sequence-parallel-async", "sequence-parallel-ring"]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cuda_step_is_a_cpu_step_and_its_gradients_are_the_plain_models(layout):
    """One rank has no neighbour, but all of its operators, the store and the optimizer run on the device."""
    ((cpu, _),) = on_ranks(1, on_device, "cpu", layout)
    ((cuda, errors),) = on_ranks(1, on_device, "cuda", layout)
    assert cuda == pytest.approx(cpu, rel=1e-4) and len(set(cuda)) == STEPS
    assert errors and max(errors.values()) < 1e-4, errors


def test_the_cpu_side_of_it_agrees_with_the_plain_model_too():
    ((losses, errors),) = on_ranks(1, on_device, "cpu", "sequence-parallel")
    assert len(set(losses)) == STEPS and max(errors.values()) < 1e-5, errors


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
