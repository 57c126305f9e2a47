"""The demo from end to end: profile this machine → plan → train with it → predicted figures beside measured ones."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.demo.text import write_run, write_text_and_tokenizer
from shardwright.demo.wanted import Wanted, check_places
from shardwright.errors import InputError
from shardwright.files.replacing import write_text
from shardwright.report import planning
from shardwright.report.console import table_console
from shardwright.report.ledger import ledger_json, ledger_table, rank_label
from shardwright.report.volume import collectives_json
from shardwright.search.plan import problem_of
from shardwright.search.search import Found, search
from shardwright.simulate.rehearsal import rehearse
from shardwright.space.problem import Problem
from shardwright.space.request import asked
from shardwright.trace import Trace
from shardwright.train.launch import launch
from shardwright.train.loop import METRICS, RECORDED_STEPS, trace_name
from shardwright.train.metrics import read_metrics

SEQUENCE = 128
"""Tokens of a sequence."""

WANTED_BATCH = 8
"""About how many sequences a step has."""


def demo(wanted: Wanted, json_path: Path | None = None, out_dir: Path | None = None) -> int:
    """Runs the demo on processes of this machine; returns the exit status.

    0: rehearsed and measured peaks are equal on every rank. 1: they are not, or a command that it starts failed.

    json_path: where the figures go as JSON. out_dir: a new or empty directory that keeps cluster file, plan, run file,
    text, tokenizer, metrics and traces; otherwise a temporary one. Raises InputError for bad input, DoesNotFit where no
    layout meets the limit.
    """
    check_places(json_path, out_dir)
    with ExitStack() as cleanup:
        if out_dir is None:
            work = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="shardwright-demo-")))
        else:
            work = _made_directory(out_dir)
        return _demo(wanted, json_path, work, table_console())


def _made_directory(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: found {path} ({error.strerror}); allowed: a directory, new or empty") from None
    return path


def _demo(wanted: Wanted, json_path: Path | None, work: Path, console: Console) -> int:
    config = work / "config.json"
    config.write_bytes(resources.files("shardwright.demo").joinpath("config.json").read_bytes())

    cluster = work / "cluster.yaml"
    _announce(console, f"Profiling this machine with {wanted.ranks} ranks")
    if not _ran(["profile", "--quick", "--dtype", wanted.dtype, "--output", str(cluster)], wanted.ranks):
        return 1

    problem = _problem(config, cluster, wanted)
    with console.status("planning") as status:
        tell = _progress(console, status)
        found = search(problem, tell=tell)
        rehearsed = []
        for rank in range(wanted.ranks):
            tell(f"rehearsing rank {rank} of the plan")
            rehearsed.append(rehearse(config, found.plan, rank=rank))
    for line in planning.headline(found):
        console.print(line, highlight=False)
    console.print(planning.candidates_table(found))

    with console.status("training the tokenizer"):
        write_text_and_tokenizer(work, json.loads(config.read_text())["vocab_size"])
    found.plan.save(work / "plan.yaml")
    _announce(console, f"Training {wanted.steps} steps on {wanted.ranks} ranks")
    if not _ran(["train", str(write_run(work, wanted.steps))], wanted.ranks):
        return 1

    measured = [Trace.load(work / trace_name(rank)) for rank in range(wanted.ranks)]
    steps = read_metrics(work / METRICS)
    console.print(ledger_table(rehearsed, measured))
    equal = _tell(console, rehearsed, measured, [line["loss"] for line in steps])
    predicted, took = _step_seconds(found, steps)
    console.print(f"Step: predicted {predicted * 1e3:,.0f} ms, measured {took * 1e3:,.0f} ms (median)", highlight=False)
    if json_path is not None:
        figures = {
            "plan": found.plan.model_dump(mode="json"),
            "rehearsed_peak": [trace.peak_bytes for trace in rehearsed],
            "measured_peak": [trace.peak_bytes for trace in measured],
            "ledger": {
                "rehearsed": [ledger_json(trace) for trace in rehearsed],
                "measured": [ledger_json(trace) for trace in measured],
            },
            "losses": [line["loss"] for line in steps],
            "step_seconds": {"predicted": predicted, "measured": took},
            "collectives": collectives_json(rehearsed[0]),
            "candidates": planning.candidates_json(found),
        }
        write_text(json_path, json.dumps(figures, indent=2) + "\n")
    return 0 if equal else 1


def _problem(config: Path, cluster: Path, wanted: Wanted) -> Problem:
    batch = global_batch(wanted.ranks)
    ask = asked(config, cluster, wanted.memory, batch, SEQUENCE, wanted.dtype, "float32", "gloo", wanted.level)
    return problem_of(replace(ask, base=ask.base.evolve(seed=wanted.seed)))


def global_batch(ranks: int, wanted: int = WANTED_BATCH) -> int:
    """The multiple of ``ranks`` nearest to ``wanted`` (the smaller of two), so that every data size divides it."""
    below = wanted // ranks * ranks
    return below if below and wanted - below <= below + ranks - wanted else below + ranks


def _announce(console: Console, line: str) -> None:
    """Says what a command that is started does, before that command says more."""
    if console.is_terminal:
        console.print(line)
    else:
        print(line, flush=True)


def _progress(console: Console, status: Any) -> Callable[[str], None]:
    if console.is_terminal:
        return lambda line: status.update(f"planning: {line}")
    return lambda line: print(f"planning: {line}", flush=True)


def _ran(words: Sequence[str], ranks: int) -> bool:
    """Whether a command of shardwright ran to its end on ``ranks`` processes; says so where it did not."""
    status = launch(words, ranks)
    if status:
        print(f"error: {words[0]} ended with exit status {status}; its messages stand above", file=sys.stderr)
    return status == 0


def _step_seconds(found: Found, steps: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(what the certified rehearsal takes by the model of the machine, the median of the steps not recorded)."""
    assert found.plan.predicted is not None and found.plan.predicted.time is not None
    seconds = [line["seconds"] for line in steps]
    return found.plan.predicted.time, statistics.median(seconds[RECORDED_STEPS:] or seconds)


def _tell(console: Console, rehearsed: Sequence[Trace], measured: Sequence[Trace], losses: Sequence[float]) -> bool:
    """Prints the losses and whether the peaks are equal on every rank."""
    fall = 1 - losses[-1] / losses[0]
    lines = [f"Loss: first {losses[0]:.4f}, last {losses[-1]:.4f} ({fall:.0%} less, {len(losses)} steps)"]
    pairs = [(expected.peak_bytes, found.peak_bytes) for expected, found in zip(rehearsed, measured, strict=True)]
    wrong = [rank for rank, (expected, found) in enumerate(pairs) if expected != found]
    if wrong:
        worst = max(wrong, key=lambda rank: abs(pairs[rank][1] - pairs[rank][0]))
        lines.append(
            f"Rehearsed and measured peaks DIFFER on {rank_label(wrong)}: on rank {worst} {pairs[worst][0]:,} bytes "
            f"were rehearsed and {pairs[worst][1]:,} measured"
        )
    else:
        lines.append(f"Rehearsed and measured peaks are equal on every rank ({max(pairs)[0]:,} bytes at most)")
    sys.stdout.flush()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return not wrong
