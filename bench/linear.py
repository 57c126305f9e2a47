"""How long one MLP step takes over slow links, how much of the communication is hidden, and what memory it costs.

    python bench/linear.py [--quick] [--hosts-by-ranks 2x1 2x2] [--rates 0.4 1 4] [--rounds 7] [--chunks N]

As root, on Linux with iproute2: bench/netlab.sh starts this file once more as each rank. Every variant is first checked
against the dense MLP (dX and both dW) and recorded for its memory; then the variants take turns, round by round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from driver import Bench, Measured, add_hosts_by_ranks
from rows import Row
from table import markdown
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from variants import Task, Variant, every_variant, rows_of, settled

import shardwright as sw
from shardwright.spec.mesh import chunk
from shardwright.trace import note
from shardwright.trace.events import Alloc, Free
from shardwright.trace.reports import active

RESIDENT = ("parameter", "buffer", "input", "gradient", "saved")
TOLERANCE = 1e-3  # of gradients, relative to dense


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    text = "pieces that overlapping modes cut a part into (0: theirs)"
    parser.add_argument("--chunks", type=int, default=0, help=text)
    add_hosts_by_ranks(parser)


def quick(options: argparse.Namespace) -> None:
    """What --quick changes."""
    options.tokens //= 4


def measure(options: argparse.Namespace) -> Measured:
    """All variants that run here, checked against dense and looked at in a recorded step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    task = Task.draw(options.tokens, options.width, options.hidden)
    variants, missing = every_variant(task, mesh, options.chunks)
    expected = dense_gradients(task)
    found = [
        {"name": v.name, "family": v.family, "saves": v.saves, **inspect(v, expected, mesh), "timed": {}}
        for v in variants
    ]
    return Measured(variants, found, {"missing": missing})


def dense_gradients(task: Task) -> list[torch.Tensor]:
    """dX, dW, dW of the whole MLP."""
    x = task.x.clone().requires_grad_()
    wanted = [x, *task.dense.parameters()]
    return list(torch.autograd.grad(task.dense(x), wanted, task.upstream))


def inspect(variant: Variant, expected: list[torch.Tensor], mesh: DeviceMesh) -> dict[str, float]:
    """How far dX and the dWs are from dense (relative), then one recorded step: its memory. The most of any rank."""
    variant.step()
    error = 0.0
    if variant.family != "compute":
        start, stop = chunk(expected[1].shape[0], mesh.size(), mesh.get_local_rank())
        parts = [rows_of(expected[0], mesh), expected[1][start:stop], expected[2][:, start:stop]]
        for part, gradient in zip(parts, variant.gradients(), strict=True):
            error = max(error, float((gradient - part).norm() / part.norm()))
    variant.clear()
    variant.give_back()
    with recorded(variant) as (trace, edges):
        variant.step()
    numbers = {"error": error, "peak": trace.peak_bytes, "saved": trace.saved_bytes}
    numbers |= {"transient": most_alive(trace, set()), "buffers": most_alive(trace, edges)}
    worst = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if not worst[0] < TOLERANCE:
        raise SystemExit(f"{variant.name}, {variant.saves}: found gradients {worst[0]:.1e} from dense")
    return dict(zip(numbers, worst.tolist(), strict=True))


@contextmanager
def recorded(variant: Variant) -> Iterator[tuple[sw.Trace, set[int]]]:
    """The trace of a step, and which of its storages are *edges*: what one layer hands to the next, either way."""
    edges = set[int]()

    def edge(tensor: torch.Tensor) -> None:
        recorder = active()
        assert recorder is not None
        edges.add(recorder.storage_of(tensor))

    def after(layer: nn.Module, args: Any, y: torch.Tensor) -> None:
        edge(y)
        y.register_hook(edge)

    hooks = [layer.register_forward_hook(after) for layer in variant.module.children()]
    hooks.append(variant.module.register_forward_hook(lambda module, args, y: note(settled(y), "input")))
    hooks.append(variant.x.register_post_accumulate_grad_hook(lambda x: note(settled(x.grad), "gradient")))
    with sw.record(variant.module) as trace:
        yield trace, edges
    for hook in hooks:
        hook.remove()


def most_alive(trace: sw.Trace, edges: set[int]) -> int:
    """The most bytes alive at once beyond parameters, gradients (dX too), saved tensors, X, Y, dY, and ``edges``."""
    alive = most = 0
    for event in trace.events:
        if isinstance(event, Alloc | Free):
            storage = trace.storages[event.storage]
            if storage.category not in RESIDENT and event.storage not in edges:
                alive += storage.bytes if isinstance(event, Alloc) else -storage.bytes
                most = max(most, alive)
    return most


if __name__ == "__main__":
    Bench(
        script=Path(__file__),
        about=__doc__ or "",
        task=("tokens", "width", "hidden", "chunks"),
        rates=(0.4, 1.0, 4.0),
        rounds=7,
        add=add,
        quick=quick,
        quick_text="a quarter of the tokens, 1 Gbit/s, at most 3 rounds",
        rows=lambda options: [Row.of(name) for name in options.hosts_by_ranks],
        measure=measure,
        markdown=markdown,
        fast_first=False,
    ).start()
