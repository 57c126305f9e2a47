"""The ledger: what is alive at the peak of each phase, by category, rehearsed beside measured; all sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwright.files.sizes import format_bytes
from shardwright.trace import CATEGORIES, PHASES, Peak, Trace

TOTAL = "total"
TOP = 20
"""Rows of the peak table before ``the rest``."""

Cells = dict[tuple[str, str], int]
"""(category or `TOTAL`, phase) → bytes."""


def peak_by_phase(trace: Trace) -> dict[str, Peak]:
    """Phase → its largest peak over the steps recorded (the first of equal ones), in the order of `PHASES`."""
    best: dict[str, Peak] = {}
    for peak in trace.peaks:
        if peak.phase not in best or peak.total > best[peak.phase].total:
            best[peak.phase] = peak
    return {phase: best[phase] for phase in PHASES if phase in best}


def cells(trace: Trace) -> Cells:
    """What is alive at the peak of each phase, by category; the rows of a phase sum to its `TOTAL`."""
    found: Cells = {}
    for phase, peak in peak_by_phase(trace).items():
        for category in CATEGORIES:
            found[category, phase] = peak.categories.get(category, 0)
        found[TOTAL, phase] = peak.total
    return found


def ledger_table(
    rehearsed: Sequence[Trace], measured: Sequence[Trace] | None = None, ranks: Sequence[int] | None = None
) -> Table:
    """Category × phase, one block for each group of ranks whose numbers are all equal.

    rehearsed, measured: one trace a rank; ranks: whose they are, ascending (None: 0, 1, …).
    A cell is ``rehearsed = measured``, or ``rehearsed ≠ measured`` in red where they differ; without ``measured`` it is
    the rehearsed number alone.
    """
    names = ranks if ranks is not None else range(len(rehearsed))
    found = [cells(trace) for trace in measured] if measured else [None] * len(rehearsed)
    groups: list[tuple[Cells, Cells | None, list[int]]] = []
    for rank, trace, right in zip(names, rehearsed, found, strict=True):
        left = cells(trace)
        for group in groups:
            if group[:2] == (left, right):
                group[2].append(rank)
                break
        else:
            groups.append((left, right, [rank]))

    beside = "left rehearsed, right measured" if measured else "rehearsed"
    table = Table(title="Bytes alive at the peak of each phase", caption=f"{beside}; the larger of the recorded steps")
    table.add_column("category", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for left, right, members in groups:
        table.add_section()
        table.add_row(Text(rank_label(members), style="bold"))
        for row in (*CATEGORIES, TOTAL):
            values = (_cell(left, right, (row, phase)) for phase in PHASES)
            table.add_row(row, *values, style="bold" if row == TOTAL else "")
    return table


def _cell(expected: Cells, found: Cells | None, key: tuple[str, str]) -> Text:
    left = expected.get(key, 0)
    if found is None:
        return Text(f"{left:,}", style="" if left else "dim")
    right = found.get(key, 0)
    if left != right:
        return Text(f"{left:,} ≠ {right:,}", style="bold red")
    return Text(f"{left:,} = {right:,}", style="" if left else "dim")


def rank_label(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0–3`` or ``ranks 0–1, 4``; ranks in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {spans}"


_BLOCK = re.compile(r"\.\d+(?=\.|$)")
"""The number of a block in a module's name."""


def alive_rows(trace: Trace) -> list[dict[str, Any]]:
    """What is alive at the peak, largest first; storages of one module, category and operator added up over blocks."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for alive in trace.alive_at_peak:
        entry = sums.setdefault((alive.category, _BLOCK.sub(".*", alive.module), alive.op), [0, 0])
        entry[0] += alive.bytes
        entry[1] += 1
    rows = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    return [
        {"bytes": size, "count": count, "category": category, "module": module, "operator": op}
        for (category, module, op), (size, count) in rows
    ]


def ledger_rows(trace: Trace) -> list[dict[str, Any]]:
    """Ledger point × category × module, the blocks of a model added up; the rows of a point sum to its total."""
    sums: dict[tuple[int, str, str, str], int] = {}
    for entry in trace.ledger:
        key = (entry.step, entry.point, entry.category, _BLOCK.sub(".*", entry.module))
        sums[key] = sums.get(key, 0) + entry.bytes
    names = ("step", "point", "category", "module")
    return [{**dict(zip(names, key, strict=True)), "bytes": size} for key, size in sums.items()]


def peak_table(trace: Trace) -> Table:
    """The `TOP` largest of what is alive at the peak, and the rest in one row."""
    rows = alive_rows(trace)
    total = f"{trace.peak_bytes:,} bytes = {format_bytes(trace.peak_bytes)}"
    table = Table(title=f"Alive at the peak: {total}")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right")
    for head in ("category", "module", "operator"):
        table.add_column(head, overflow="fold")
    for row in rows[:TOP]:
        where = (Text(row[key] or "–") for key in ("category", "module", "operator"))
        table.add_row(f"{row['bytes']:,}", str(row["count"]), *where)
    rest = rows[TOP:]
    if rest:
        table.add_section()
        table.add_row(f"{sum(row['bytes'] for row in rest):,}", str(sum(row["count"] for row in rest)), "the rest")
    return table


def ledger_json(trace: Trace) -> dict[str, Any]:
    """The ledger as plain data: peaks by phase and category, ledger points, saved bytes, what is alive at the peak."""
    return {
        "peak": trace.peak_bytes,
        "saved": trace.saved_bytes,
        "phases": {
            phase: {"step": peak.step, TOTAL: peak.total, "categories": dict(peak.categories)}
            for phase, peak in peak_by_phase(trace).items()
        },
        "points": [
            {"step": point.step, "name": point.name, TOTAL: point.total, "categories": dict(point.categories)}
            for point in trace.points
        ],
        "entries": ledger_rows(trace),
        "alive_at_peak": alive_rows(trace),
    }
