"""The rehearsal: the training step recorded with fake tensors and a fake process group, in one process.

It runs the runtime's own code, so what it records is what the run will do: no accelerator, any world size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright import models
from shardwright._errors import InputError
from shardwright._parallelize import parallelize
from shardwright._plan import Plan
from shardwright.comm import Runtime
from shardwright.mesh import coordinates
from shardwright.params.initial import unfilled
from shardwright.step import TrainStep, record_steps
from shardwright.trace import Trace


def rehearse(config: Any, plan: Plan, rank: int = 0, steps: int = 2) -> Trace:
    """What ``rank`` would do in its first ``steps`` training steps under ``plan``.

    config: a path of a config.json, or a Hugging Face config. The trace's ``arena`` tells the slots that the run needs.
    Raises InputError where the plan does not fit the model, or where this process already has a process group.
    """
    coordinates(rank, plan.mesh)
    if dist.is_initialized():
        raise InputError("rehearse: found a process group in this process; allowed: a process of its own")
    if isinstance(config, (str, Path)):
        config = models.load_config(config)
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        runtime = Runtime.of(mesh, plan.backend)
        model = models.build_meta(config, plan.dtype)
        with FakeTensorMode():
            model = parallelize(model, mesh, plan, source=unfilled(torch.device("cpu")))
            step = TrainStep(model, mesh, plan)
            batches = [_micro_batches(plan, step) for _ in range(steps)]
            _, trace = record_steps(step, batches)
        trace.arena = runtime.arena.most
        return trace
    finally:
        dist.destroy_process_group()


def _micro_batches(plan: Plan, step: TrainStep) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (plan.batch // step.loss.tokens.size, plan.sequence)
    return [
        (torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)) for _ in range(plan.accumulation)
    ]
