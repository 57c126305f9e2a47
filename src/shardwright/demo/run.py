"""The demo from end to end: text → tokenizer → rehearsed candidates → plan → training → rehearsed beside measured."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright._errors import DoesNotFit, InputError
from shardwright._files import write_yaml
from shardwright._plan import Plan
from shardwright._rehearse import rehearse
from shardwright._replacing import check_directory, write_text
from shardwright.demo.candidates import (
    Candidate,
    by_preference,
    candidate_table,
    does_not_fit,
    enumerate_layouts,
    global_batch,
    reason,
)
from shardwright.planner.certify import predicted, slots
from shardwright.report.console import table_console
from shardwright.report.ledger import ledger_json, ledger_table, rank_label
from shardwright.report.volume import collectives_json
from shardwright.sharding import LEVELS
from shardwright.trace import Trace
from shardwright.train.data import standard_library, standard_library_text, train_tokenizer
from shardwright.train.launch import launch
from shardwright.train.loop import METRICS, RECORDED_STEPS, trace_name
from shardwright.train.metrics import read_metrics
from shardwright.train.sources import documents

SEQUENCE = 128
"""Tokens of a sequence."""

DTYPE = "float32"
LEARNING_RATE = 1e-3

TEXT_PACKAGE = "encodings"
"""What the demo reads of the standard library: source that repeats much, so that a short run has something to learn."""

TEXT_BYTES = 3 * 2**20
"""The most that it reads of it."""

HEADER = "shardwright run: the demo's training. Every path is relative to this file."


def demo(
    ranks: int,
    memory: int | None,
    steps: int,
    seed: int,
    json_path: Path | None = None,
    out_dir: Path | None = None,
    level: str | None = None,
) -> int:
    """Runs the demo on ``ranks`` processes of this machine; returns the exit status.

    0: rehearsed and measured peaks are equal on every rank. 1: they are not, or the training run failed.

    memory: the limit in bytes that the peak of every rank must meet, None for no limit. steps: optimizer steps.
    json_path: where the figures go as JSON. out_dir: a new or empty directory that keeps plan, run file, text,
    tokenizer, metrics and traces; otherwise a temporary one. level: how every candidate stores its parameters; by
    default whole, and pure data parallelism at other levels too.
    Raises InputError for bad input, DoesNotFit where no layout meets the limit.
    """
    if ranks < 1:
        raise InputError(f"--ranks: found {ranks}; allowed: at least 1")
    if steps < RECORDED_STEPS:
        raise InputError(f"--steps: found {steps}; allowed: at least {RECORDED_STEPS}, the steps that are recorded")
    if level is not None and level not in LEVELS:
        raise InputError(f"--level: found {level!r}; allowed: {', '.join(LEVELS)}")
    if json_path is not None:
        check_directory(json_path, "--json")
    console = table_console()
    with ExitStack() as cleanup:
        if out_dir is None:
            work = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="shardwright-demo-")))
        else:
            work = _empty_directory(out_dir)
        return _demo(ranks, memory, steps, seed, json_path, work, console, level)


def _empty_directory(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: found {path} ({error.strerror}); allowed: a directory, new or empty") from None
    if any(path.iterdir()):
        raise InputError(f"--output: found {path}, which is not empty; allowed: a directory, new or empty")
    return path


def _demo(
    ranks: int,
    memory: int | None,
    steps: int,
    seed: int,
    json_path: Path | None,
    work: Path,
    console: Console,
    level: str | None,
) -> int:
    config = work / "config.json"
    config.write_bytes(resources.files("shardwright.demo").joinpath("config.json").read_bytes())

    candidates = _rehearse_candidates(config, enumerate_layouts(ranks, level), seed, console)
    try:
        fitting = by_preference(candidates, memory)
        chosen, rehearsed = _first_that_fits(config, fitting, memory, console)
    except (InputError, DoesNotFit):
        console.print(candidate_table(candidates, memory))
        raise
    console.print(candidate_table(candidates, memory, chosen))
    console.print(reason(chosen, fitting, len(candidates), memory), highlight=False, soft_wrap=True)
    assert chosen.plan is not None
    plan = chosen.plan.evolve(predicted=predicted(rehearsed), arena=slots(rehearsed))

    with console.status("training the tokenizer"):
        _write_text(work, json.loads(config.read_text())["vocab_size"])
    plan.save(work / "plan.yaml")
    _write_run(work, steps)
    if console.is_terminal:
        console.print(f"Training {steps} steps on {ranks} ranks")
    else:
        print(f"training {steps} steps on {ranks} ranks", flush=True)
    status = launch(work / "run.yaml", ranks)
    if status:
        print(f"error: the training run ended with exit status {status}; its messages stand above", file=sys.stderr)
        return 1

    measured = [Trace.load(work / trace_name(rank)) for rank in range(ranks)]
    losses = [line["loss"] for line in read_metrics(work / METRICS)]
    console.print(ledger_table(rehearsed, measured))
    equal = _tell(console, rehearsed, measured, losses)
    if json_path is not None:
        figures = {
            "plan": plan.model_dump(mode="json"),
            "rehearsed_peak": [trace.peak_bytes for trace in rehearsed],
            "measured_peak": [trace.peak_bytes for trace in measured],
            "ledger": {
                "rehearsed": [ledger_json(trace) for trace in rehearsed],
                "measured": [ledger_json(trace) for trace in measured],
            },
            "losses": losses,
            "collectives": collectives_json(rehearsed[0]),
            "candidates": [candidate.to_json(memory) for candidate in candidates],
        }
        write_text(json_path, json.dumps(figures, indent=2) + "\n")
    return 0 if equal else 1


def _rehearse_candidates(
    config: Path, layouts: Sequence[tuple[dict[str, int], str, str]], seed: int, console: Console
) -> list[Candidate]:
    """Every candidate with its rehearsal of rank 0; one that its sizes refuse keeps the line that says so."""
    done: list[Candidate] = []
    with console.status("rehearsing") as status:
        for number, (mesh, layout, level) in enumerate(layouts, start=1):
            candidate = Candidate(mesh, layout, level)
            _progress(console, status, f"rehearsing {number} of {len(layouts)}: {candidate.name}")
            plan = Plan.for_config(
                config,
                mesh=mesh,
                layout=layout,
                batch=global_batch(mesh["data"] * mesh["tensor"]),
                sequence=SEQUENCE,
                seed=seed,
                dtype=DTYPE,
                params={"*": level},
            )
            try:
                done.append(Candidate(mesh, layout, level, plan, rehearse(config, plan, rank=0)))
            except InputError as error:
                done.append(Candidate(mesh, layout, level, refused=str(error)))
    return done


def _first_that_fits(
    config: Path, fitting: Sequence[Candidate], memory: int | None, console: Console
) -> tuple[Candidate, list[Trace]]:
    """The first candidate that fits on every rank, with the rehearsals of all of them."""
    peaks: list[tuple[int, str]] = []
    for candidate in fitting:
        assert candidate.plan is not None and candidate.trace is not None
        traces = [candidate.trace]
        with console.status("rehearsing") as status:
            for rank in range(1, candidate.plan.world_size):
                _progress(console, status, f"rehearsing rank {rank} of {candidate.name}")
                traces.append(rehearse(config, candidate.plan, rank=rank))
        if memory is None or max(trace.peak_bytes for trace in traces) <= memory:
            return candidate, traces
        peaks.append((max(trace.peak_bytes for trace in traces), candidate.name))
    raise does_not_fit(peaks, memory)


def _progress(console: Console, status: Any, line: str) -> None:
    if console.is_terminal:
        status.update(line)
    else:
        print(line, flush=True)


def _write_text(work: Path, vocab_size: int) -> None:
    """Copies the text that the run reads into ``work/text`` and trains ``work/tokenizer.json`` on it."""
    copies: list[Path] = []
    for source in standard_library_text(max_bytes=TEXT_BYTES, package=TEXT_PACKAGE):
        copy = work / "text" / source.relative_to(standard_library()).with_suffix(".txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        copies.append(copy)
    train_tokenizer(documents("text", copies), vocab_size, work / "tokenizer.json")


def _write_run(work: Path, steps: int) -> None:
    run = {
        "version": 1,
        "plan": "plan.yaml",
        "data": {"text": ["text/**/*.txt"], "tokenizer": "tokenizer.json"},
        "steps": steps,
        "learning_rate": LEARNING_RATE,
        "output": ".",
        "record": True,
    }
    write_yaml(work / "run.yaml", run, HEADER)


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
