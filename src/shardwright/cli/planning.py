"""``shardwright plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.common import SIZE, STORED, JsonOption, app, check_directories, exit_status, tell_remarks
from shardwright.cli.old_flags import renamed_flags
from shardwright.errors import InputError
from shardwright.files.replacing import write_text
from shardwright.space.request import SECONDS
from shardwright.spec.dtypes import SHORT

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright.space.request import Asked


OLD_FLAGS = {"--batch": "--global-batch", "--max-batch": "--max-micro-batch"}
"""What options of earlier versions are called now; they are read still."""


@app.command(cls=renamed_flags(OLD_FLAGS))
def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config, or a directory with one.")],
    cluster: Annotated[Path | None, typer.Option(metavar="CLUSTER.yaml", help="The cluster, as a file.")] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="A common machine, such as 8xH100-80GB or 256xH100-80GB.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"Limit for the peak of a device, {SIZE}; default: all of it.")
    ] = None,
    global_batch: Annotated[int, typer.Option(help="Sequences of a step, over the whole cluster.")] = 0,
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
    max_micro_batch: Annotated[
        bool,
        typer.Option("--max-micro-batch", help="For the largest micro-batch, doubled as often as it fits."),
    ] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Take a model without a rule table too: data parallel, linears unsplit.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PLAN.yaml", help="Write the plan.")] = None,
    json_path: JsonOption = None,
    picture: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw what memory buys into FILE.")
    ] = None,
) -> None:
    """Find the fastest layout that fits, prove it by a rehearsal, and explain it."""
    with exit_status():
        check_directories(output=output, json=json_path, svg=picture)
        if (cluster is None) == (devices is None):
            raise InputError("--cluster: found both or neither of it and --devices; allowed: one of them")
        counted = {"--min-devices": min_devices, "--max-sequence": max_sequence, "--max-micro-batch": max_micro_batch}
        answer = _one_of(counted)
        from shardwright.space.request import asked

        types = (SHORT.get(dtype, dtype), SHORT.get(master_dtype, master_dtype))
        ask = asked(config, cluster or devices or "", memory, global_batch, sequence, *types, backend, level, fallback)

        from shardwright.report.console import table_console
        from shardwright.search.plan import runs_unsplit

        console = table_console()
        if not runs_unsplit(ask):
            _searched(console, ask, answer, seconds, output, json_path, picture)
            return
        _refuse_beside_fallback(counted | {"--svg": picture is not None})
        _unsplit(console, ask, output, json_path)


def _one_of(counted: dict[str, bool]) -> str:
    """The option that was given, or what is asked without one. Raises InputError for two."""
    given = [option for option, wanted in counted.items() if wanted]
    if len(given) > 1:
        raise InputError(f"{given[0]}: found it beside {given[1]}; allowed: one of them")
    return given[0] if given else "the fastest"


def _refuse_beside_fallback(wanted: dict[str, bool]) -> None:
    for option, given in wanted.items():
        if given:
            allowed = "neither, since this model has no rule table"
            raise InputError(f"{option}: found it beside --fallback; allowed: {allowed}")


def _searched(
    console: Console,
    ask: Asked,
    answer: str,
    seconds: float,
    output: Path | None,
    json_path: Path | None,
    picture: Path | None,
) -> None:
    """The search, written and told. answer: an option, or none of them."""
    from shardwright.models.remarks import not_applied, warnings_of
    from shardwright.report import planning
    from shardwright.search import pareto
    from shardwright.search.plan import largest_batch, least_devices, longest_sequence, problem_of
    from shardwright.search.search import search

    searches = {"--min-devices": least_devices, "--max-sequence": longest_sequence, "--max-micro-batch": largest_batch}
    problem = problem_of(ask)
    with console.status("planning") as status:
        found = searches.get(answer, search)(problem, seconds, tell=lambda line: status.update(f"planning: {line}"))
        points = pareto.curve(found.looked_at)
        knobs = pareto.knobs([point for point in points if point.peak <= found.problem.memory])
    unapplied = not_applied(problem.config, found.plan)
    if output is not None:  # before a word is said: whoever reads may close the pipe
        found.plan.save(output)
    if json_path is not None:
        figures = planning.found_json(found, points, knobs)
        figures["not_applied"] = [each.to_json() for each in unapplied]
        write_text(json_path, json.dumps(figures, indent=2) + "\n")
    here = min(points, key=lambda point: (abs(point.seconds - found.assignment.seconds), point.peak))
    if picture is not None:
        write_text(picture, planning.curve_svg(points, found.problem.memory, here))
    for line in planning.headline(found):
        console.print(line, highlight=False)
    console.print(planning.candidates_table(found))
    console.print(planning.curve_table(points, knobs, here))
    console.print(planning.distance_table(found))
    tell_remarks(console, unapplied, warnings_of(problem.config, found.plan))


def _unsplit(console: Console, ask: Asked, output: Path | None, json_path: Path | None) -> None:
    """The best data-parallel plan of a model without a rule table, written and told."""
    from shardwright.models.config import load_config
    from shardwright.models.remarks import not_applied, warnings_of
    from shardwright.report import unsplit
    from shardwright.search.unsplit import search_unsplit

    with console.status("planning") as status:
        found = search_unsplit(ask, tell=lambda line: status.update(f"planning: {line}"))
    config = load_config(ask.base.config_path)
    unapplied = not_applied(config, found.plan)
    if output is not None:
        found.plan.save(output)
    if json_path is not None:
        figures = unsplit.found_json(found) | {"not_applied": [each.to_json() for each in unapplied]}
        write_text(json_path, json.dumps(figures, indent=2) + "\n")
    for line in unsplit.headline(found):
        console.print(line, highlight=False)
    console.print(unsplit.ways_table(found))
    tell_remarks(console, unapplied, warnings_of(config, found.plan))
