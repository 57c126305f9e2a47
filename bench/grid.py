"""What one MLP keeps, holds and sends on grids of ranks, beside axonn on the same grids, and how long a step takes.

    python bench/grid.py [--quick] [--grids 2x4:2x2x2 2x2:1x2x2 2x2:2x2x1] [--rates 1 4] [--rounds 5]

As root, on Linux with iproute2: bench/netlab.sh starts this file once more as each rank. Every variant is first checked
against the dense MLP (dX and both dW), recorded for its memory, and one step's bytes are read off the interfaces; then
the variants take turns, round by round.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from driver import Bench, Measured
from grid_table import markdown
from grid_variants import AXES, GridVariant, every_variant
from linear import dense_gradients, most_alive, recorded
from rows import Row
from timing import COUNTER
from torch.distributed.device_mesh import init_device_mesh
from variants import Task

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
TOLERANCE = 1e-3  # of gradients, relative to dense


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    grids = ["2x4:2x2x2", "2x2:1x2x2", "2x2:2x2x1"]
    text = "hosts x ranks of each : the grid over them, whose first axis is the slowest"
    parser.add_argument("--grids", nargs="+", default=grids, metavar="HxR:IxJxL", help=text)


def check(options: argparse.Namespace) -> str | None:
    """What is wrong with a grid that was asked for."""
    for name in options.grids:
        try:
            (hosts, ranks), sizes = shape_of(name)
            fits = len(sizes) == len(AXES) and hosts * ranks == math.prod(sizes)
        except ValueError:
            fits = False
        if not fits:
            return f"--grids: found {name!r}; allowed: HxR:IxJxL with H·R = I·J·L"
    return None


def quick(options: argparse.Namespace) -> None:
    """What --quick changes."""
    options.tokens //= 4


def shape_of(name: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """``"2x4:2x2x2"`` → ((2, 4), (2, 2, 2)): hosts and ranks of each, and the grid."""
    machine, grid = name.split(":")
    hosts, ranks = (int(size) for size in machine.split("x"))
    return (hosts, ranks), tuple(int(size) for size in grid.split("x"))


def rows(options: argparse.Namespace) -> list[Row]:
    """One for each grid."""
    shapes = {name: shape_of(name) for name in options.grids}
    return [Row(*machine, ["--grids", name], {"grid": sizes}) for name, (machine, sizes) in shapes.items()]


# -- what each rank does ----------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Measured:
    """All variants that run on the grid, checked against dense and looked at in recorded steps."""
    _, sizes = shape_of(options.grids[0])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    task = Task.draw(options.tokens, options.width, options.hidden)
    variants, missing = every_variant(task, mesh)
    expected = dense_gradients(task)
    found = [
        {"name": v.name, "family": v.family, "saves": v.saves, **inspect(v, expected), "timed": {}} for v in variants
    ]
    return Measured(variants, found, {"missing": missing})


def inspect(variant: GridVariant, expected: list[torch.Tensor]) -> dict[str, float]:
    """How far dX and the dWs are from dense (relative), the bytes of a step, and the memory of a recorded one.

    The most of any rank; bytes are the busiest host's divided by its ranks: ``link`` left the host, ``wire`` is that
    and what its ranks sent each other.
    """
    variant.step()
    error = 0.0
    if variant.family != "compute":
        for part, gradient in zip(variant.parts(expected), variant.gradients(), strict=True):
            error = max(error, float((gradient - part).norm() / part.norm()))
    link, wire = sent(variant)
    variant.clear()
    with recorded(variant) as (trace, _):
        variant.step()
    numbers = {"error": error, "link": link, "wire": wire, "peak": trace.peak_bytes, "saved": trace.saved_bytes}
    numbers["transient"] = most_alive(trace, set())
    worst = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if not worst[0] < TOLERANCE:
        raise SystemExit(f"{variant.name}, {variant.saves}: found gradients {worst[0]:.1e} from dense")
    return dict(zip(numbers, worst.tolist(), strict=True))


def sent(variant: GridVariant) -> tuple[float, float]:
    """Bytes that this host's interfaces sent in one step, for each of its ranks: over the link, and over both."""
    variant.clear()
    dist.barrier()
    before = [int(counter.read_text()) for counter in (COUNTER, LOOPBACK)]
    variant.step()
    dist.barrier()
    link, loopback = (
        int(counter.read_text()) - count for counter, count in zip((COUNTER, LOOPBACK), before, strict=True)
    )
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    return link / ranks, (link + loopback) / ranks


if __name__ == "__main__":
    Bench(
        script=Path(__file__),
        about=__doc__ or "",
        task=("tokens", "width", "hidden"),
        rates=(1.0, 4.0),
        rounds=5,
        add=add,
        quick=quick,
        quick_text="a quarter of the tokens, 1 Gbit/s, at most 3 rounds",
        rows=rows,
        measure=measure,
        markdown=markdown,
        check=check,
    ).start()
