"""The rehearsal: the runtime's own code recorded with fake tensors and a fake process group, in one process.

What it records is what the run will do: no accelerator, any world size. Three jobs can be rehearsed: training steps,
the initialisation of a model from its plan's seed, and an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug as dtensor_debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.errors import InputError
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.models.parallelize import put
from shardwright.runtime.runtime import Runtime
from shardwright.simulate.fake import ShortFakeMode
from shardwright.spec.mesh import chunk, coordinates, ranks_along, world_size
from shardwright.spec.plan import Plan
from shardwright.step.train_step import TrainStep, record_evaluation, record_initialisation, record_steps
from shardwright.trace import Trace, collector_at_rest
from shardwright.values.initial import Unfilled

MicroBatches = list[tuple[torch.Tensor, torch.Tensor]]


def rehearse(config: Any, plan: Plan, rank: int = 0, steps: int | Sequence[int] = 2, job: str = "steps") -> Trace:
    """What ``rank`` would do under ``plan``.

    config: a path of a config.json, or a Hugging Face config. job: ``steps`` (the first ``steps`` training steps; a
    sequence tells how many micro-batches each of them has, instead of the plan), ``initialisation`` (of the weights),
    or ``evaluation`` (of one step's batches, without gradients). The trace's ``arena`` tells the slots that the job
    needs. Raises InputError where the plan does not fit the model, or where this process already has a process group.
    """
    if job not in JOBS:
        raise InputError(f"job: found {job!r}; allowed: {', '.join(JOBS)}")
    if isinstance(config, (str, Path)):
        config = load_config(config)
    with collector_at_rest(), stage(plan, rank) as mesh:
        model = build_meta(config, plan.stored_dtype)
        each = [plan.accumulation] * steps if isinstance(steps, int) else list(steps)
        with ShortFakeMode(), _values_refused():
            trace = JOBS[job](model, mesh, plan, each)
        trace.arena = Runtime.of(mesh).arena.most
        return trace


@contextmanager
def _values_refused() -> Iterator[None]:
    """An operator that needs values, which a rehearsal does not have, is named in one line."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise InputError(
            f"rehearse: found {error.func}, whose result depends on values; allowed: models that do not look at them"
        ) from None


@contextmanager
def stage(plan: Plan, rank: int) -> Iterator[DeviceMesh]:
    """The plan's mesh over a fake process group, as ``rank`` sees it; gone when the block ends."""
    coordinates(rank, plan.mesh)
    if dist.is_initialized():
        raise InputError("rehearse: found a process group in this process; allowed: a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        mesh = _mesh(plan.mesh, rank)
        Runtime.of(mesh, plan.backend)  # made here, outside of any fake-tensor mode
        yield mesh
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _mesh(sizes: Mapping[str, int], rank: int) -> DeviceMesh:
    """The mesh with the groups of this rank only: thousands of others would take minutes to make."""
    groups = [dist.new_group(list(ranks_along(rank, (axis,), sizes)), use_local_synchronization=True) for axis in sizes]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        "cpu",
        mesh=torch.arange(world_size(sizes)).view(*sizes.values()),
        mesh_dim_names=tuple(sizes),
    )


def _forget_meshes() -> None:
    """DTensor keeps a mesh with what it has worked out for it; a later one of that shape would be given this one."""
    clear = getattr(dtensor_debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def _steps(model: Any, mesh: DeviceMesh, plan: Plan, steps: list[int]) -> Trace:
    step = TrainStep(put(model, mesh, plan, source=Unfilled(torch.device("cpu"))), mesh, plan)
    step.accumulation = None  # a step may have as many micro-batches as was asked for
    _, trace = record_steps(step, [_micro_batches(plan, step, count) for count in steps])
    return trace


def _evaluation(model: Any, mesh: DeviceMesh, plan: Plan, steps: list[int]) -> Trace:
    step = TrainStep(put(model, mesh, plan, source=Unfilled(torch.device("cpu"))), mesh, plan)
    _, trace = record_evaluation(step, _micro_batches(plan, step, plan.accumulation))
    return trace


def _initialisation(model: Any, mesh: DeviceMesh, plan: Plan, steps: list[int]) -> Trace:
    _, trace = record_initialisation(lambda: put(model, mesh, plan))
    return trace


JOBS: dict[str, Callable[[Any, DeviceMesh, Plan, list[int]], Trace]] = {
    "steps": _steps,
    "initialisation": _initialisation,
    "evaluation": _evaluation,
}


def _micro_batches(plan: Plan, step: TrainStep, count: int) -> MicroBatches:
    first, end = chunk(plan.micro_batch, step.loss.tokens.size, step.loss.tokens.index)
    shape = (end - first, plan.sequence)
    return [(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)) for _ in range(count)]
