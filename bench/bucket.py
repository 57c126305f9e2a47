"""What a gradient bucket costs and buys where a model has many small parameters: time, collectives, memory by phase.

    python bench/bucket.py [--quick] [--hosts-by-ranks 2x1 2x2] [--rates 1 4] [--caps 0 1MiB 5MiB 25MiB 100MiB]

As root, on Linux with iproute2, and with fairscale 0.4.13: bench/netlab.sh starts this file once more as each rank.
Every variant's gradients are first compared with the means of the unsharded model's, and its third step is recorded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bucket_table import markdown
from bucket_variants import Task, every_variant
from driver import Bench, Measured, add_hosts_by_ranks
from rows import Row
from sharding import TOLERANCE, mean_gradients, recorded
from sharding_variants import Variant
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.trace import PHASES, Alloc, Free, Mark, Op

STANDING = ("parameter", "buffer", "gradient", "optimizer")
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "send")


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--blocks", type=int, default=8, help="each has a matrix and 25 norms and biases")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="rows of each rank")
    parser.add_argument("--caps", nargs="+", default=["0", "1MiB", "5MiB", "25MiB", "100MiB"])
    add_hosts_by_ranks(parser)


def quick(options: argparse.Namespace) -> None:
    """What --quick changes."""
    options.hosts_by_ranks, options.tokens = options.hosts_by_ranks[:1], options.tokens // 8


def measure(options: argparse.Namespace) -> Measured:
    """All variants, their gradients compared with the unsharded model's, each looked at in a recorded step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    task = Task.draw(options.blocks, options.width, options.tokens)
    variants = every_variant(task, mesh, options.caps)
    expected = mean_gradients(variants[0])
    found = [{"name": v.name, "family": v.family, **inspect(v, expected), "timed": {}} for v in variants]
    return Measured(variants, found)


def inspect(variant: Variant, expected: list[torch.Tensor]) -> dict[str, Any]:
    """How far the gradients are from the means; then of a recorded step, the most of any rank:

    collectives: how many (ours by the trace; those of others by the calls of torch's communication operators), and
    reductions: those of them that are not gathers; launches: all calls of those operators, sends included. peak: bytes,
    by phase. bucket: the most bytes of buckets alive at once (of ours and fairscale's; DDP's count as carried, and
    outside). carried: the most bytes alive at once in storages that carry communication and are neither parameters,
    gradients nor states; outside: what of them is left after the optimizer's step.
    """
    error = 0.0
    if variant.family != "compute":
        for gradient, mean in zip(variant.gradients(), expected, strict=True):
            error = max(error, float((gradient - mean).norm() / mean.norm()))
    for _ in range(2):  # DDP settles its buckets in the second
        variant.step()
    with recorded(variant) as (trace, carriers):
        variant.step()
    launched = _launched(trace)
    kinds = [each.kind for each in trace.collectives] or launched
    carried, outside = _carried(trace, carriers)
    buckets = {number for number, storage in enumerate(trace.storages) if storage.category == "bucket"}
    peaks = {f"peak in {phase}": trace.phase_peaks.get(phase, 0) for phase in PHASES}
    numbers = {
        "error": error,
        "collectives": len(kinds),
        "reductions": len([kind for kind in kinds if "gather" not in kind]),
        "launches": len(launched),
        "peak": trace.peak_bytes,
        **peaks,
        "bucket": _carried(trace, buckets)[0],
        "carried": carried,
        "outside": outside,
    }
    worst = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if not worst[0] < TOLERANCE:
        raise SystemExit(f"{variant.name}: found gradients {worst[0]:.1e} from the means")
    return dict(zip(numbers, worst.tolist(), strict=True))


def _launched(trace: sw.Trace) -> list[str]:
    """The communication operators called."""
    names = [event.name.split(".")[1] for event in trace.events if isinstance(event, Op) and "c10d." in event.name]
    return [name for name in names if any(kind in name for kind in COLLECTIVES)]


def _carried(trace: sw.Trace, carriers: set[int]) -> tuple[int, int]:
    """(the most bytes of ``carriers`` alive at once, those left after the step), what stands in any case aside."""
    alive = most = outside = 0
    for event in trace.events:
        if isinstance(event, Alloc | Free) and event.storage in carriers:
            storage = trace.storages[event.storage]
            if storage.category not in STANDING:
                alive += storage.bytes if isinstance(event, Alloc) else -storage.bytes
                most = max(most, alive)
        elif isinstance(event, Mark) and event.point in ("after step", "done"):
            outside = max(outside, alive)
    return most, outside


if __name__ == "__main__":
    Bench(
        script=Path(__file__),
        about=__doc__ or "",
        task=("blocks", "width", "tokens"),
        rates=(1.0, 4.0),
        rounds=5,
        add=add,
        quick=quick,
        quick_text="2 ranks, 1 Gbit/s, at most 3 rounds, an eighth of the tokens",
        rows=lambda options: [Row.of(name, ["--caps", *options.caps]) for name in options.hosts_by_ranks],
        measure=measure,
        markdown=markdown,
    ).start()
