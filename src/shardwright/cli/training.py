"""The commands that run on ranks: the demo, training, and the profile of a machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.common import SIZE, STORED, JsonOption, app, exit_status
from shardwright.errors import InputError
from shardwright.spec.dtypes import SHORT


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes of this machine to train on.")] = 4,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help=f"Limit for the peak of a rank, {SIZE}.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps, at least 2.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    level: Annotated[str | None, typer.Option(metavar="LEVEL", help=f"Store parameters so: {STORED}.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Element type of products, fp32 or bf16, which many processors are slow at.")
    ] = "fp32",
    json_path: JsonOption = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep plan, text, metrics and traces in DIR (new or empty).")
    ] = None,
) -> None:
    """Do the whole job on this machine: profile it, plan a small Llama, train with the plan, compare."""
    with exit_status():
        from shardwright.files.sizes import parse_bytes

        limit = parse_bytes(memory, "--memory") if memory is not None else None

        from shardwright.demo.wanted import Wanted, check_places

        wanted = Wanted(ranks, limit, steps, seed, level, SHORT.get(dtype, dtype))
        check_places(json_path, output)

        from shardwright.demo.run import demo as run_demo

        status = run_demo(wanted, json_path, output)
    if status:
        raise typer.Exit(status)


@app.command()
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")],
    ranks: Annotated[int | None, typer.Option(help="Start so many ranks on this machine first.")] = None,
) -> None:
    """Train, as one rank of those that torch's launcher starts, or on ranks that are started here (--ranks).

    python -m torch.distributed.run --nproc-per-node N -m shardwright train RUN.yaml
    """
    with exit_status():
        if ranks is not None:
            if ranks < 1 or "RANK" in os.environ:
                found = f"{ranks} in a rank of a launcher" if ranks >= 1 else ranks
                raise InputError(f"--ranks: found {found}; allowed: at least 1, outside of a launcher")

            from shardwright.train.preparation import stated

            stated(run, ranks)

            from shardwright.train.launch import launch

            raise typer.Exit(launch(["train", str(run)], ranks))

        from shardwright.train.loop import train as run_training

        run_training(run)


@app.command()
def profile(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="CLUSTER.yaml", help="The cluster file to write.")],
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Measure groups of this mesh, such as data=2,tensor=4; default: every size."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Products of this element type, several times for more: bf16, fp32, …"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions.")] = False,
) -> None:
    """Measure links and products, as one rank of those that torch's launcher starts, and write a cluster file.

    python -m torch.distributed.run --nproc-per-node N -m shardwright profile -o CLUSTER.yaml
    """
    with exit_status():
        from shardwright.profile.profile import profile as measure

        measure(output, mesh, [SHORT.get(name, name) for name in dtype or []], quick)
