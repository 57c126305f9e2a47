"""What agreement costs: steps of one model with ``checks`` and without, side by side, on gloo ranks of this machine.

    python bench/agreement.py --ranks 2 --rounds 20

A model of ``blocks`` blocks (width 256, hidden 1024), 512 tokens a rank, float32; one row a level: milliseconds of a
step without and with checks, and the ratio of the two, each the median over rounds; then the quartiles of the ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.spec.sharding import LEVELS

WIDTH, HIDDEN, TOKENS = 256, 1024, 512


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    began = time.perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def rank_main(rank: int, ranks: int, store: str, rounds: int, blocks: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    for level in LEVELS:
        runs = []
        for checks in (False, True):
            torch.manual_seed(0)
            model = sw.shard(nn.Sequential(*(block() for _ in range(blocks))), mesh, level, checks=checks)
            runs.append((model, torch.optim.SGD(model.parameters(), lr=1e-3)))
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + 2):
            for place, (model, optimizer) in enumerate(runs):
                dist.barrier()
                taken = step(model, optimizer, x)
                if number >= 2:  # the first two learn the order of gathers
                    seconds[place].append(taken)
        if rank == 0:
            answers.put((level, seconds))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        arguments = (options.ranks, store, options.rounds, options.blocks, answers)
        workers = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(options.ranks)]
        for worker in workers:
            worker.start()
        print("| level | without, ms | with, ms | ratio | its quartiles |\n|---|---|---|---|---|")
        for _ in LEVELS:
            level, (without, with_checks) = answers.get()
            ratios = sorted(b / a for a, b in zip(without, with_checks, strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(
                f"| {level} | {1e3 * statistics.median(without):.1f} | {1e3 * statistics.median(with_checks):.1f} | "
                f"{statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |",
                flush=True,
            )
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
