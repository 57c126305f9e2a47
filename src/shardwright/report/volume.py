"""What one rank sends in a step: its collectives counted by kind, mesh axes and, where asked, phase."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shardwright.trace import Collective, Trace


def collectives_json(trace: Trace, step: int = 1, *, by_phase: bool = False) -> list[dict[str, Any]]:
    """The collectives of a step as plain data, in the order of their first appearance.

    Each entry: kind, axes, (phase,) count, size (bytes of the full tensors) and sent (bytes this rank sends).
    """
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for collective in trace.collectives:
        if collective.step != step:
            continue
        key = _key(collective, by_phase)
        if key not in entries:
            where = {"phase": collective.phase} if by_phase else {}
            entries[key] = {
                "kind": collective.kind,
                "axes": list(collective.axes),
                **where,
                "count": 0,
                "size": 0,
                "sent": 0,
            }
        entry = entries[key]
        entry["count"] += 1
        entry["size"] += collective.size
        entry["sent"] += collective.sent
    return list(entries.values())


def _key(collective: Collective, by_phase: bool) -> tuple[Any, ...]:
    key = (collective.kind, tuple(collective.axes))
    return (*key, collective.phase) if by_phase else key


def collectives_table(trace: Trace, step: int = 1) -> Table:
    """Kind × axes × phase of one step: how many, bytes of the full tensors, bytes that this rank sends."""
    entries = collectives_json(trace, step, by_phase=True)
    table = Table(title=f"Collectives of step {step}: {sum(entry['sent'] for entry in entries):,} bytes sent")
    for head in ("kind", "axes", "phase"):
        table.add_column(head)
    for head in ("count", "bytes", "bytes sent"):
        table.add_column(head, justify="right")
    for entry in entries:
        axes = ", ".join(entry["axes"])
        numbers = (f"{entry[key]:,}" for key in ("count", "size", "sent"))
        table.add_row(entry["kind"], axes, entry["phase"], *numbers)
    return table
