"""How long one data-parallel training step takes over slow links, what of the communication is hidden, what it holds.

    python bench/sharding.py [--quick] [--hosts-by-ranks 2x1 2x2] [--rates 1 4] [--rounds 5]

As root, on Linux with iproute2: bench/netlab.sh starts this file once more as each rank. Every variant's gradients are
first compared with the means of the unsharded model's, and its second step is recorded for its memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from driver import Bench, Measured, add_hosts_by_ranks
from rows import Row
from sharding_table import markdown
from sharding_variants import Task, Variant, every_variant
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param

import shardwright as sw
from shardwright import trace
from shardwright.trace.events import Alloc, Free

TOLERANCE = 1e-4  # of gradients, relative
LANDED = ("parameter", "buffer", "input", "gradient", "optimizer")


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank")
    parser.add_argument("--sequence", type=int, default=128)
    add_hosts_by_ranks(parser)


def measure(options: argparse.Namespace) -> Measured:
    """All variants, their gradients compared with the unsharded model's, each looked at in a recorded step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    task = Task.draw(options.layers, options.width, options.batch, options.sequence)
    variants = every_variant(task, mesh)
    expected = mean_gradients(variants[0])
    found = [{"name": v.name, "family": v.family, **inspect(v, expected), "timed": {}} for v in variants]
    return Measured(variants, found)


def mean_gradients(alone: Variant) -> list[torch.Tensor]:
    """Of the unsharded model, over all ranks."""
    found = alone.gradients()
    for gradient in found:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return found


def inspect(variant: Variant, expected: list[torch.Tensor]) -> dict[str, float]:
    """How far the gradients are from the means, then a recorded step: its memory. The most of any rank.

    transient: the most bytes alive at once in storages that a communication operator was handed, or that hold gathered
    parameters; parameters, gradients that have landed and inputs are not counted.
    """
    error = 0.0
    if variant.family != "compute":
        for gradient, mean in zip(variant.gradients(), expected, strict=True):
            error = max(error, float((gradient - mean).norm() / mean.norm()))
    variant.step()
    with recorded(variant) as (trace_, carriers):
        variant.step()
    numbers = {"error": error, "peak": trace_.peak_bytes, "transient": most_alive(trace_, carriers)}
    worst = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if not worst[0] < TOLERANCE:
        raise SystemExit(f"{variant.name}: found gradients {worst[0]:.1e} from the means")
    return dict(zip(numbers, worst.tolist(), strict=True))


class Carriers:
    """The storages that communication operators were handed."""

    def __init__(self) -> None:
        self.storages = set[int]()

    def operator(self, name: str, storages: list[int]) -> None:
        """Keeps those of torch's communication operators and of FSDP2's copies in and out."""
        if name.startswith(("c10d.", "fsdp.")):
            self.storages.update(storages)


@contextmanager
def recorded(variant: Variant) -> Iterator[tuple[sw.Trace, set[int]]]:
    """The trace of a step, and which of its storages carried communication."""
    carriers = Carriers()

    # FSDP2 gives the memory of gathered parameters back by resizing their storage, unseen by operators.
    freed, allocated = _fsdp_param.free_storage, _fsdp_param.alloc_storage

    def free(tensor: torch.Tensor) -> None:
        trace.released(tensor)
        freed(tensor)

    def allocate(tensor: torch.Tensor) -> None:
        empty = not tensor.untyped_storage().size()
        allocated(tensor)
        if empty:
            trace.renewed(tensor, "gathered")

    def landed(*_: Any) -> None:
        for parameter in variant.module.parameters():
            if parameter.grad is not None:
                trace.note(parameter.grad, "gradient")

    hook = variant.optimizer.register_step_pre_hook(landed)
    with (
        mock.patch.object(_fsdp_param, "free_storage", free),
        mock.patch.object(_fsdp_param, "alloc_storage", allocate),
        sw.record(variant.module, variant.optimizer, observer=carriers) as found,
    ):
        yield found, carriers.storages
    hook.remove()
    for number, storage in enumerate(found.storages):
        if storage.category in ("gathered", "unreduced"):
            carriers.storages.add(number)


def most_alive(found: sw.Trace, carriers: set[int]) -> int:
    """The most bytes of ``carriers`` alive at once, what has landed aside."""
    alive = most = 0
    for event in found.events:
        if isinstance(event, Alloc | Free) and event.storage in carriers:
            storage = found.storages[event.storage]
            if storage.category not in LANDED:
                alive += storage.bytes if isinstance(event, Alloc) else -storage.bytes
                most = max(most, alive)
    return most


if __name__ == "__main__":
    Bench(
        script=Path(__file__),
        about=__doc__ or "",
        task=("layers", "width", "batch", "sequence"),
        rates=(1.0, 4.0),
        rounds=5,
        add=add,
        quick=lambda options: None,
        quick_text="1 Gbit/s, at most 3 rounds",
        rows=lambda options: [Row.of(name) for name in options.hosts_by_ranks],
        measure=measure,
        markdown=markdown,
    ).start()
