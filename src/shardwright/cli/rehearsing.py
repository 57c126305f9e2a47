"""``shardwright rehearse``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.common import STORED, JsonOption, app, check_directories, exit_status, tell_remarks
from shardwright.cli.old_flags import renamed_flags
from shardwright.errors import InputError
from shardwright.files.config_file import read_config
from shardwright.files.replacing import write_text
from shardwright.spec.dtypes import SHORT

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright.models.remarks import NotApplied
    from shardwright.spec.plan import Plan
    from shardwright.trace import Trace


OLD_FLAGS = {"--batch": "--micro-batch"}
"""What options of earlier versions are called now; they are read still."""


@app.command(cls=renamed_flags(OLD_FLAGS))
def rehearse(
    source: Annotated[Path, typer.Argument(metavar="PLAN.yaml|CONFIG.json", help="A plan, or a model's config.")],
    layout: Annotated[str | None, typer.Option(metavar="NAME", help="Layout of every site (config only).")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="Mesh such as data=2,tensor=4 (config only).")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences of a micro-batch over the mesh (config only).")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence (config only).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Element type of products: bf16 (default) or fp32.")] = None,
    master_dtype: Annotated[
        str | None, typer.Option(help="Element type of stored parameters and moments: fp32 (default) or bf16.")
    ] = None,
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
        from shardwright.spec.plan import Plan

        choices = {
            "layout": layout,
            "mesh": mesh,
            "micro_batch": micro_batch,
            "sequence": sequence,
            "dtype": dtype,
            "master_dtype": master_dtype,
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
                        f"--{name.replace('_', '-')}: found {value} beside a plan; allowed: only with a config, "
                        "since the plan states it"
                    )
            plan = Plan.load(source)
        _rehearse(plan, _ranks(rank, plan.world_size), job, cluster, json_path, picture)


def _plan_for_config(config: Path, choices: dict[str, Any]) -> Plan:
    from shardwright.spec.mesh import parse_mesh
    from shardwright.spec.plan import Plan

    for name in ("layout", "mesh", "micro_batch", "sequence"):
        if choices[name] is None:
            raise InputError(
                f"--{name.replace('_', '-')}: found nothing; allowed: a value, which a config does not state"
            )
    given = {name: value for name, value in choices.items() if value is not None}
    given["mesh"] = parse_mesh(given["mesh"])
    if "level" in given:
        given["params"] = {"*": given.pop("level")}
    given.setdefault("dtype", "bf16")
    for name in ("dtype", "master_dtype"):
        if name in given:
            given[name] = SHORT.get(given[name], given[name])
    plan = Plan.for_config(config, **given)
    read_config(plan.config_path)
    return plan


def _ranks(text: str, world: int) -> list[int]:
    if text == "all":
        return list(range(world))
    if not (text.isascii() and text.isdigit() and int(text) < world):
        raise InputError(f"--rank: found {text}; allowed: 0 to {world - 1}, or all")
    return [int(text)]


def _rehearse(
    plan: Plan, ranks: list[int], job: str, cluster_path: Path | None, json_path: Path | None, picture: Path | None
) -> None:
    from shardwright.spec.cluster import Cluster

    cluster = Cluster.load(cluster_path) if cluster_path is not None else None
    if cluster is not None:
        cluster.check_devices(plan.world_size, str(cluster_path))
    check_directories(json=json_path, svg=picture)

    from shardwright.models.config import load_config
    from shardwright.models.remarks import not_applied, warnings_of
    from shardwright.report.console import save_picture, table_console
    from shardwright.simulate.rehearsal import rehearse as rehearse_rank

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
    config = load_config(plan.config_path)
    unapplied = not_applied(config, plan)
    tell_remarks(console, unapplied, warnings_of(config, plan))
    if picture is not None:
        axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        save_picture(console, picture, f"{plan.config_path.name} · {axes} · rehearsed")
    if json_path is not None:
        _write_json(json_path, plan, traces, sites, unapplied)
    fullest = max(traces, key=lambda rank: traces[rank].peak_bytes)
    peak = traces[fullest].peak_bytes
    if cluster is not None:
        cluster.check_peak(peak, f"the peak of rank {fullest} is")


def _show(console: Console, traces: dict[int, Trace]) -> None:
    """Peaks by phase, the ledger, and of the fullest rank what is alive at the peak and what it sends."""
    from shardwright.files.sizes import format_bytes
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

    from shardwright.families.table import family_of, has_rule
    from shardwright.models.config import load_config
    from shardwright.report.bounds import sites_json

    config = load_config(plan.config_path)
    if not has_rule(config):
        return []
    fullest = max(traces.values(), key=lambda trace: trace.peak_bytes)
    sites = family_of(config).sites(config, plan.micro_batch * plan.sequence)
    return sites_json(fullest, sites, plan.world_size, getattr(torch, plan.dtype).itemsize, plan.accumulation)


def _write_json(
    path: Path, plan: Plan, traces: dict[int, Trace], sites: list[dict[str, Any]], unapplied: Sequence[NotApplied]
) -> None:
    from shardwright.report.ledger import ledger_json
    from shardwright.report.volume import collectives_json

    figures = {
        "plan": plan.model_dump(mode="json"),
        "ranks": list(traces),
        "rehearsed_peak": [trace.peak_bytes for trace in traces.values()],
        "ledger": [ledger_json(trace) for trace in traces.values()],
        "sites": sites,
        "not_applied": [each.to_json() for each in unapplied],
        "collectives": [collectives_json(trace, by_phase=True) for trace in traces.values()],
    }
    write_text(path, json.dumps(figures, indent=2) + "\n")
