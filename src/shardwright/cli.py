"""The commands. Exit status: 0 done, 1 failed, 2 bad input, 3 does not fit; 2 and 3 come with one line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright._errors import DoesNotFit, InputError
from shardwright._replacing import check_directory, write_text
from shardwright.planner import SECONDS
from shardwright.sharding import LEVELS

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright._plan import Plan
    from shardwright.trace import Trace

# Everything heavy (torch, transformers) is imported inside the commands, so that --help answers at once.

BAD_INPUT, DOES_NOT_FIT = 2, 3
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
"""Short names of element types."""

STORED = ", ".join(LEVELS)
SIZE = "such as 72GiB (GiB = 2^30 bytes)"
app = typer.Typer(
    name="shardwright",
    help="Fits a model onto devices, shows what is alive at the peak, and trains with that layout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON.")]


def main() -> None:
    """The entry point of ``shardwright``."""
    app()


@contextmanager
def exit_status() -> Iterator[None]:
    """Turns bad input into one line and exit status 2, a model that does not fit into one line and 3."""
    try:
        yield
    except InputError as error:
        _fail(error, BAD_INPUT)
    except DoesNotFit as error:
        _fail(error, DOES_NOT_FIT)


def _fail(error: Exception, status: int) -> None:
    sys.stdout.flush()
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    raise typer.Exit(status)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes of this machine to train on.")] = 4,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help=f"Limit for the peak of a rank, {SIZE}.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps, at least 2.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    level: Annotated[str | None, typer.Option(metavar="LEVEL", help=f"Store parameters so: {STORED}.")] = None,
    json_path: JsonOption = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep plan, text, metrics and traces in DIR (new or empty).")
    ] = None,
) -> None:
    """Do the whole job on this machine: profile it, plan a small Llama, train with the plan, compare."""
    with exit_status():
        from shardwright._files import parse_bytes

        limit = parse_bytes(memory, "--memory") if memory is not None else None

        from shardwright.demo.run import demo as run_demo

        status = run_demo(ranks, limit, steps, seed, json_path, output, level)
    if status:
        raise typer.Exit(status)


@app.command()
def train(run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]) -> None:
    """Train, as one rank of those that torch's launcher starts.

    python -m torch.distributed.run --nproc-per-node N -m shardwright train RUN.yaml
    """
    with exit_status():
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
        from shardwright.planner.profile import profile as measure

        measure(output, mesh, [DTYPES.get(name, name) for name in dtype or []], quick)


@app.command()
def rehearse(
    source: Annotated[Path, typer.Argument(metavar="PLAN.yaml|CONFIG.json", help="A plan, or a model's config.")],
    layout: Annotated[str | None, typer.Option(metavar="NAME", help="Layout of every site (config only).")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="Mesh such as data=2,tensor=4 (config only).")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a micro-batch over the mesh (config only).")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence (config only).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or bf16 (config only).")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches of a step (config only).")] = None,
    level: Annotated[
        str | None,
        typer.Option(metavar="LEVEL", help=f"Store parameters over the data axes so (config only): {STORED}."),
    ] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Take a model without a rule table, its linears unsplit (config only).")
    ] = False,
    job: Annotated[str, typer.Option(metavar="JOB", help="steps, initialisation or evaluation.")] = "steps",
    rank: Annotated[str, typer.Option(metavar="N|all", help="The rank to rehearse.")] = "0",
    cluster: Annotated[Path | None, typer.Option(metavar="CLUSTER.yaml", help="Check against these devices.")] = None,
    json_path: JsonOption = None,
    picture: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the tables into FILE.")] = None,
) -> None:
    """Tell what one training step allocates and sends, without running it: no accelerator, any number of ranks."""
    with exit_status():
        from shardwright._plan import Plan

        choices = {
            "layout": layout,
            "mesh": mesh,
            "batch": batch,
            "sequence": sequence,
            "dtype": dtype,
            "accumulation": accumulation,
            "level": level,
            "fallback": fallback or None,
        }
        if source.is_dir() or source.suffix == ".json":
            plan = _plan_for_config(source, choices)
        else:
            for name, value in choices.items():
                if value is not None:
                    raise InputError(
                        f"--{name}: found {value} beside a plan; allowed: only with a config, the plan states it"
                    )
            plan = Plan.load(source)
        _rehearse(plan, _ranks(rank, plan.world_size), job, cluster, json_path, picture)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config, or a directory with one.")],
    cluster: Annotated[Path | None, typer.Option(metavar="CLUSTER.yaml", help="The cluster, as a file.")] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="A common machine, such as 8xH100-80GB or 256xH100-80GB.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"Limit for the peak of a device, {SIZE}; default: all of it.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of a step, over the whole cluster.")] = 0,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 0,
    dtype: Annotated[str, typer.Option(help="Element type of products: bf16 or fp32.")] = "bf16",
    master_dtype: Annotated[str, typer.Option(help="Element type of stored parameters and moments.")] = "fp32",
    backend: Annotated[str, typer.Option(help="nccl or gloo.")] = "nccl",
    level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help=f"Only this way to store parameters: {STORED}.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long structures are priced.")] = SECONDS,
    min_devices: Annotated[bool, typer.Option("--min-devices", help="On the fewest devices that work.")] = False,
    max_sequence: Annotated[
        bool, typer.Option("--max-sequence", help="For the longest sequence, doubled as often as it fits.")
    ] = False,
    max_batch: Annotated[
        bool,
        typer.Option("--max-batch", help="For the largest batch in one micro-batch, doubled as often as it fits."),
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PLAN.yaml", help="Write the plan.")] = None,
    json_path: JsonOption = None,
    picture: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw what memory buys into FILE.")
    ] = None,
) -> None:
    """Find the fastest layout that fits, prove it by a rehearsal, and explain it."""
    with exit_status():
        for path, option in ((output, "--output"), (json_path, "--json"), (picture, "--svg")):
            if path is not None:
                check_directory(path, option)
        if (cluster is None) == (devices is None):
            raise InputError("--cluster: found both or neither of it and --devices; allowed: one of them")
        asked = {"--min-devices": min_devices, "--max-sequence": max_sequence, "--max-batch": max_batch}
        given = [option for option, wanted in asked.items() if wanted]
        if len(given) > 1:
            raise InputError(f"{given[0]}: found it beside {given[1]}; allowed: one of them")
        from shardwright.planner import pareto
        from shardwright.planner.request import largest_batch, least_devices, longest_sequence, request
        from shardwright.planner.search import search
        from shardwright.report import planning
        from shardwright.report.console import table_console

        types = (DTYPES.get(dtype, dtype), DTYPES.get(master_dtype, master_dtype))
        problem = request(config, cluster or devices or "", memory, batch, sequence, *types, backend, level)
        searches = {"--min-devices": least_devices, "--max-sequence": longest_sequence, "--max-batch": largest_batch}
        ask = searches[given[0]] if given else search
        console = table_console()
        with console.status("planning") as status:
            found = ask(problem, seconds, tell=lambda line: status.update(f"planning: {line}"))
            points = pareto.curve(found.looked_at)
            knobs = pareto.knobs([point for point in points if point.peak <= found.problem.memory])
        if output is not None:  # before a word is said: whoever reads may close the pipe
            found.plan.save(output)
        if json_path is not None:
            write_text(json_path, json.dumps(planning.found_json(found, points, knobs), indent=2) + "\n")
        here = min(points, key=lambda point: (abs(point.seconds - found.mix.seconds), point.peak))
        if picture is not None:
            write_text(picture, planning.curve_svg(points, found.problem.memory, here))
        for line in planning.headline(found):
            console.print(line, highlight=False)
        console.print(planning.candidates_table(found))
        console.print(planning.curve_table(points, knobs, here))
        console.print(planning.distance_table(found))


@app.command()
def bounds(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config.")],
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Numbers of ranks.")] = "8,64,512",
    tokens: Annotated[str, typer.Option(metavar="N,N", help="Tokens of a batch.")] = "8192,65536,1048576",
) -> None:
    """Tell what the products of a model move on their best grids, and the least that they could."""
    with exit_status():
        from shardwright import models
        from shardwright.report.bounds import bounds_table
        from shardwright.report.console import table_console

        loaded = models.load_config(config)
        sites = models.family_of(loaded).sites(loaded, 1)
        table_console().print(bounds_table(sites, _numbers(ranks, "--ranks"), _numbers(tokens, "--tokens")))


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"{option}: found {text!r}; allowed: whole numbers of at least 1, such as 8,64,512")
    return [int(part) for part in parts]


@app.command()
def schema(
    kind: Annotated[str | None, typer.Argument(metavar="plan|cluster|run", help="The kind of file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write into FILE.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="All kinds, as a page to read.")] = False,
) -> None:
    """Print the JSON schema of a file that users write, for editors to check and complete against."""
    with exit_status():
        from shardwright.report import schema as schemas

        if markdown and kind is not None:
            raise InputError(f"--markdown: found {kind} beside it; allowed: alone, the page tells of every kind")
        if not markdown and kind not in schemas.FILES:
            raise InputError(f"schema: found {kind or 'nothing'}; allowed: {', '.join(schemas.FILES)}")
        if kind is None:
            text = schemas.markdown()
        else:
            text = json.dumps(schemas.json_schema(kind), indent=2, ensure_ascii=False) + "\n"
        if output is None:
            print(text, end="")
        else:
            check_directory(output, "--output")
            write_text(output, text)


def _plan_for_config(config: Path, choices: dict[str, Any]) -> Plan:
    from shardwright._plan import Plan
    from shardwright.mesh import parse_mesh

    for name in ("layout", "mesh", "batch", "sequence"):
        if choices[name] is None:
            raise InputError(f"--{name}: found nothing; allowed: a value, which a config does not state")
    given = {name: value for name, value in choices.items() if value is not None}
    given["mesh"] = parse_mesh(given["mesh"])
    if "level" in given:
        given["params"] = {"*": given.pop("level")}
    if "dtype" in given:
        given["dtype"] = DTYPES.get(given["dtype"], given["dtype"])
    return Plan.for_config(config, **given)


def _ranks(text: str, world: int) -> list[int]:
    if text == "all":
        return list(range(world))
    if not (text.isascii() and text.isdigit() and int(text) < world):
        raise InputError(f"--rank: found {text}; allowed: 0 to {world - 1}, or all")
    return [int(text)]


def _rehearse(
    plan: Plan, ranks: list[int], job: str, cluster_path: Path | None, json_path: Path | None, picture: Path | None
) -> None:
    from shardwright.cluster import Cluster

    cluster = Cluster.load(cluster_path) if cluster_path is not None else None
    if cluster is not None and cluster.devices != plan.world_size:
        raise InputError(
            f"mesh: found {plan.world_size} ranks for the {cluster.devices} devices of {cluster_path}; "
            f"allowed: a mesh of exactly {cluster.devices}"
        )

    for path, option in ((json_path, "--json"), (picture, "--svg")):
        if path is not None:
            check_directory(path, option)

    from shardwright._files import format_bytes
    from shardwright._rehearse import rehearse as rehearse_rank
    from shardwright.report.console import save_picture, table_console

    console = table_console(record=picture is not None)
    traces: dict[int, Trace] = {}
    with console.status("rehearsing") as status:
        for rank in ranks:
            status.update(f"rehearsing rank {rank} of {plan.world_size}")
            traces[rank] = rehearse_rank(plan.config_path, plan, rank=rank, job=job)
    _show(console, traces)
    sites = _sites(plan, traces)
    if sites:
        from shardwright.report.bounds import sites_table

        console.print(sites_table(sites))
    if picture is not None:
        axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        save_picture(console, picture, f"{plan.config_path.name} · {axes} · rehearsed")
    if json_path is not None:
        _write_json(json_path, plan, traces, sites)
    fullest = max(traces, key=lambda rank: traces[rank].peak_bytes)
    peak = traces[fullest].peak_bytes
    if cluster is not None and peak > cluster.memory_bytes:
        raise DoesNotFit(
            f"does not fit: the peak of rank {fullest} is {format_bytes(peak)} ({peak:,} bytes), "
            f"a device holds {format_bytes(cluster.memory_bytes)} ({cluster.memory_bytes:,} bytes)"
        )


def _show(console: Console, traces: dict[int, Trace]) -> None:
    """Peaks by phase, the ledger, and of the fullest rank what is alive at the peak and what it sends."""
    from shardwright._files import format_bytes
    from shardwright.report.ledger import ledger_table, peak_table
    from shardwright.report.volume import collectives_table

    fullest = max(traces.values(), key=lambda trace: trace.peak_bytes)
    for phase, peak in fullest.phase_peaks.items():
        console.print(f"peak of {phase:8}  {peak:>16,} bytes  {format_bytes(peak):>12}", highlight=False)
    console.print(
        f"saved for backward{fullest.saved_bytes:>16,} bytes  {format_bytes(fullest.saved_bytes):>12}", highlight=False
    )
    console.print(ledger_table(list(traces.values()), ranks=list(traces)))
    console.print(peak_table(fullest))
    console.print(collectives_table(fullest))


def _sites(plan: Plan, traces: dict[int, Trace]) -> list[dict[str, Any]]:
    """What each site moves on the fullest rank, beside the bound; nothing for a model without a rule table."""
    import torch

    from shardwright import models
    from shardwright.report.bounds import sites_json

    config = models.load_config(plan.config_path)
    if not models.has_rule(config):
        return []
    fullest = max(traces.values(), key=lambda trace: trace.peak_bytes)
    sites = models.family_of(config).sites(config, plan.batch * plan.sequence)
    return sites_json(fullest, sites, plan.world_size, getattr(torch, plan.dtype).itemsize, plan.accumulation)


def _write_json(path: Path, plan: Plan, traces: dict[int, Trace], sites: list[dict[str, Any]]) -> None:
    from shardwright.report.ledger import ledger_json
    from shardwright.report.volume import collectives_json

    figures = {
        "plan": plan.model_dump(mode="json"),
        "ranks": list(traces),
        "rehearsed_peak": [trace.peak_bytes for trace in traces.values()],
        "ledger": [ledger_json(trace) for trace in traces.values()],
        "sites": sites,
        "collectives": [collectives_json(trace, by_phase=True) for trace in traces.values()],
    }
    write_text(path, json.dumps(figures, indent=2) + "\n")
