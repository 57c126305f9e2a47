"""What was found for a model without a rule table, told: the plan, and the options that were rehearsed."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shardwright.files.sizes import format_bytes
from shardwright.search.unsplit import FoundUnsplit, Rehearsed


def headline(found: FoundUnsplit) -> list[str]:
    """The plan in a few lines."""
    plan, best, ask = found.plan, found.best, found.asked
    tokens, devices = ask.base.micro_batch * ask.base.sequence, ask.cluster.devices
    speed = tokens / best.seconds / devices
    return [
        f"plan        data={plan.mesh['data']}, {best.option.name}; linears unsplit, since the model has no rule table",
        f"step        {best.seconds * 1e3:,.4g} ms for {tokens:,} tokens: {speed:,.0f} tokens/s a device",
        f"peak        {format_bytes(best.peak)} ({best.peak:,} bytes), "
        f"{format_bytes(ask.memory - best.peak)} below the memory limit",
        "bound       none: grids are not searched without a rule table",
        f"looked at   {len(found.looked_at)} ways, each rehearsed in full, in {plan.solve_time or 0.0:.0f} s",
    ]


def ways_table(found: FoundUnsplit) -> Table:
    """Every option that was rehearsed, and why it is not the plan."""
    table = Table(title="why not another", title_justify="left")
    for head, justify in (("way", "left"), ("step", "right"), ("peak", "right"), ("why not", "left")):
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for each in found.looked_at:
        seconds = f"{each.seconds * 1e3:,.4g} ms"
        table.add_row(each.option.name, seconds, format_bytes(each.peak), _why_not(found, each))
    return table


def found_json(found: FoundUnsplit) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "plan": found.plan.model_dump(mode="json"),
        "global_batch": found.plan.global_batch,
        "objective": found.plan.objective,
        "memory": found.asked.memory,
        "peak": found.best.peak,
        "solve_time": found.plan.solve_time,
        "candidates": [
            {"way": each.option.name, "seconds": each.seconds, "peak": each.peak, "why_not": _why_not(found, each)}
            for each in found.looked_at
        ],
    }


def _why_not(found: FoundUnsplit, each: Rehearsed) -> str:
    if each is found.best:
        return "this is the plan"
    if each.peak > found.asked.memory:
        return f"{format_bytes(each.peak - found.asked.memory)} over the memory limit"
    return f"{each.seconds / found.best.seconds - 1:.1%} slower"
