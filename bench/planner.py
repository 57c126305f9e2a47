"""Whether predicted step times rank layouts as measured ones do: one small Llama on four ranks, profiled and trained.

    python bench/planner.py [--quick] [--machines 2x2 4x1] [--rates 0.1] [--rounds 7]
    python bench/planner.py --again build/bench/planner.json      predicts anew what was measured then

As root, on Linux with iproute2: bench/netlab.sh starts this file once more as each rank. A row first profiles its
machine as `shardwright profile` does; then the layouts take turns, round by round; then each is rehearsed, and its
second step is timed by the model on what the profile found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planner_layouts import LAYOUTS, Layout, Task
from planner_table import markdown
from rows import Row, run
from timing import limit, time_in_turns, write
from torch.distributed.device_mesh import init_device_mesh

from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.models.parallelize import parallelize
from shardwright.profile import profile
from shardwright.simulate.machine import Machine
from shardwright.simulate.rehearsal import rehearse
from shardwright.simulate.timeline import timeline
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan
from shardwright.step.train_step import TrainStep

STEADY = 2  # the step that is predicted: the first one makes the optimizer's moments


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences over all ranks")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--machines", nargs="+", default=["2x2", "4x1"], metavar="HxR", help="four ranks each")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.1], help="Gbit/s that a host sends; one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a quick profile, at most 3 rounds")
    parser.add_argument("--patience", type=float, default=60, help="seconds a row may wait for other programs to pause")
    parser.add_argument("--out", type=Path, default=Path("build/bench/planner.json"))
    parser.add_argument("--again", type=Path, help="results to predict anew, without measuring")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 3)
    for name in options.machines:
        hosts, _, ranks = name.partition("x")
        if not (hosts.isdigit() and ranks.isdigit() and int(hosts) * int(ranks) == 4):
            parser.error(f"--machines: found {name!r}; allowed: HxR with H·R = 4")
    return options


def main() -> int:
    """Measures every machine, or reads what was measured; predicts; prints the tables."""
    options = arguments()
    if options.again is not None:
        results = json.loads(options.again.read_text())
    else:
        task = {key: getattr(options, key) for key in ("layers", "width", "batch", "sequence", "rounds", "patience")}
        given = ["--quick"] if options.quick else []
        results = run(Path(__file__), task, options.rates, [Row.of(name, given) for name in options.machines])
    out = options.again or options.out
    model = {key: results["task"][key] for key in ("layers", "width", "batch", "sequence")}
    config = out.parent / "planner" / "config.json"
    Task(**model).write_config(config)
    for group in results["groups"]:
        cluster = Cluster.model_validate(group["cluster"])
        for variant in group["variants"]:
            plan = Task(**model).plan(Layout(**variant["layout"]), config)
            variant["predicted"] = predict(plan, cluster)
    write(out, results)
    print(markdown(results))
    return 0


def predict(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What the model says of rank 0's steady step."""
    trace = rehearse(plan.config_path, plan, steps=STEADY)
    machine = Machine(cluster, plan.mesh, plan.dtype, plan.backend, plan.stored_dtype)
    step = timeline(trace, machine, STEADY)
    return {
        "ms": step.seconds * 1e3,
        "compute_ms": step.compute * 1e3,
        "exposed_ms": {axis: seconds * 1e3 for axis, seconds in step.exposed.items()},
        "phases_ms": {phase: seconds * 1e3 for phase, seconds in step.phases.items()},
        "sent": sum(event.sent for event in trace.collectives if event.step == STEADY),
    }


# -- what each rank does ----------------------------------------------------------------------------------------------


class Training:
    """A layout that takes steps on one batch."""

    def __init__(self, plan: Plan) -> None:
        mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        config = load_config(plan.config_path)
        model = parallelize(build_meta(config, plan.stored_dtype), mesh, plan)
        self._step = TrainStep(model, mesh, plan)
        tokens = self._step.loss.tokens
        rows = plan.micro_batch // tokens.size
        text = torch.randint(0, 2048, (plan.micro_batch, plan.sequence + 1), generator=torch.Generator().manual_seed(7))
        mine = text[tokens.index * rows : (tokens.index + 1) * rows]
        self._batch = [(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())]

    def clear(self) -> None:
        """A step leaves nothing behind."""

    def step(self) -> None:
        """One training step; its loss is read."""
        self._step(self._batch).item()


def work() -> None:
    """Profiles the machine, then measures all layouts; rank 0 writes what was found."""
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    limit(options.rates[0])
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    axes = profile.every_size(dist.get_world_size() // per_host, per_host)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    effort = profile.Effort.of("cpu", options.quick)
    cluster = profile.measure(mesh, per_host, ["float32"], effort, torch.device("cpu"))
    if dist.get_rank() == 0:
        print(profile.summary(cluster), flush=True)

    task = Task(options.layers, options.width, options.batch, options.sequence)
    config = options.out.parent / f"rank{dist.get_rank()}" / "config.json"
    task.write_config(config)
    found = [{"name": layout.name, "layout": asdict(layout), "timed": {}} for layout in LAYOUTS]
    variants = [Training(task.plan(layout, config)) for layout in LAYOUTS]
    for variant in variants:
        for _ in range(STEADY):  # makes the moments, and settles what is gathered ahead
            variant.step()
    time_in_turns(variants, found, options.rates, options.rounds, options.patience)
    if dist.get_rank() == 0:
        write(options.out, {"cluster": cluster.model_dump(mode="json", exclude_none=True), "variants": found})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        work()
    else:
        sys.exit(main())
