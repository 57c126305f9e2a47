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
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from grid_table import markdown
from grid_variants import AXES, GridVariant, every_variant
from linear import dense_gradients, most_alive, recorded
from rows import Row, run
from timing import COUNTER, limit, time_in_turns, write
from torch.distributed.device_mesh import init_device_mesh
from variants import Task

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
TOLERANCE = 1e-3  # of gradients, relative to dense


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    grids = ["2x4:2x2x2", "2x2:1x2x2", "2x2:2x2x1"]
    text = "hosts x ranks of each : the grid over them, whose first axis is the slowest"
    parser.add_argument("--grids", nargs="+", default=grids, metavar="HxR:IxJxL", help=text)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 4.0], help="Gbit/s that a host sends")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, 1 Gbit/s, at most 3 rounds")
    parser.add_argument("--patience", type=float, default=60, help="seconds a row may wait for other programs to pause")
    parser.add_argument("--out", type=Path, default=Path("build/bench/grid.json"))
    options = parser.parse_args()
    for name in options.grids:
        try:
            (hosts, ranks), sizes = shape_of(name)
            fits = len(sizes) == len(AXES) and hosts * ranks == math.prod(sizes)
        except ValueError:
            fits = False
        if not fits:
            parser.error(f"--grids: found {name!r}; allowed: HxR:IxJxL with H·R = I·J·L")
    if options.quick:
        options.tokens, options.rates, options.rounds = options.tokens // 4, [1.0], min(options.rounds, 3)
    return options


def shape_of(name: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """``"2x4:2x2x2"`` → ((2, 4), (2, 2, 2)): hosts and ranks of each, and the grid."""
    machine, grid = name.split(":")
    hosts, ranks = (int(size) for size in machine.split("x"))
    return (hosts, ranks), tuple(int(size) for size in grid.split("x"))


def main() -> int:
    """Runs every grid in namespaces of its own, joins the results and prints the tables."""
    options = arguments()
    task = {key: getattr(options, key) for key in ("tokens", "width", "hidden", "rounds", "patience")}
    rows = []
    for name in options.grids:
        (hosts, ranks), sizes = shape_of(name)
        rows.append(Row(hosts, ranks, ["--grids", name], {"grid": sizes}))
    results = run(Path(__file__), task, options.rates, rows)
    write(options.out, results)
    print(markdown(results))
    return 0


# -- what each rank does ----------------------------------------------------------------------------------------------


def work() -> None:
    """Measures all variants on one grid at all rates; rank 0 writes what was found."""
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _, sizes = shape_of(options.grids[0])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    task = Task.draw(options.tokens, options.width, options.hidden)
    limit(40.0)  # until times are taken
    variants, missing = every_variant(task, mesh)
    expected = dense_gradients(task)
    found = [
        {"name": v.name, "family": v.family, "saves": v.saves, **inspect(v, expected), "timed": {}} for v in variants
    ]
    del expected
    time_in_turns(variants, found, options.rates, options.rounds, options.patience)
    if dist.get_rank() == 0:
        write(options.out, {"variants": found, "missing": missing})
    dist.barrier()
    dist.destroy_process_group()


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
    if "LOCAL_RANK" in os.environ:
        work()
    else:
        sys.exit(main())
