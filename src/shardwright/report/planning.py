"""What the planner found, told: the plan, why not another, what memory buys, how far each site is from its bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from shardwright.files.sizes import format_bytes
from shardwright.formulas.bounds import Grid
from shardwright.search.candidate import told
from shardwright.search.distance import Distance, distance
from shardwright.search.pareto import Knob, Point
from shardwright.search.search import Found

ROWS = 12
"""Candidates that are told, at most."""


def headline(found: Found) -> list[str]:
    """The plan in a few lines."""
    plan, problem = found.plan, found.problem
    tokens = problem.global_batch * problem.base.sequence
    assert plan.objective is not None and plan.gap is not None and plan.predicted is not None
    peak, memory = found.certificate.peak_bytes, problem.memory
    speed = tokens / plan.objective / problem.devices
    priced, left = len(found.looked_at), len(found.left)
    lines = [
        f"plan        {found.candidate.structure.name}",
        f"blocks      {told(found.candidate, found.assignment)}",
        f"step        {_ms(plan.objective)} for {tokens:,} tokens: {speed:,.0f} tokens/s a device",
        f"timeline    {_ms(plan.predicted.time or 0.0)} of the certified rehearsal, by the same model of the machine",
        f"peak        {format_bytes(peak)} ({peak:,} bytes), {format_bytes(memory - peak)} below the memory limit",
        f"bound       {_ms(found.bound)}: no plan of the space is faster by the model; gap {plan.gap:.1%}",
        f"looked at   {priced} structures priced, {left} left with a bound, in {plan.solve_time or 0.0:.0f} s",
        "certified   composed and rehearsed peak, saved bytes and volume are equal; collectives agree on all ranks",
    ]
    return lines


def candidates_table(found: Found) -> Table:
    """The best of each structure that was priced, and why it is not the plan."""
    table = Table(title="why not another", title_justify="left")
    for head, justify in (("structure", "left"), ("step", "right"), ("peak", "right"), ("why not", "left")):
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for each in candidates_json(found)[:ROWS]:
        peak = format_bytes(each["peak"]) if each["peak"] is not None else "–"
        table.add_row(each["structure"], _ms(each["seconds"]) if each["seconds"] else "–", peak, each["why_not"])
    return table


def candidates_json(found: Found) -> list[dict[str, Any]]:
    """The same as plain data: seconds and peak (bytes) of the fastest that fits, or the least that it needs."""
    rows = []
    for each in found.looked_at:
        fits = each.assignment is not None
        assignment = each.assignment or each.lean
        if each.structure == found.candidate.structure:
            why = "this is the plan"
        elif each.assignment is not None:
            why = f"{_ms(each.assignment.seconds - found.assignment.seconds)} slower"
        elif each.lean is not None:
            over = each.lean.peak - found.problem.memory
            why = f"needs {format_bytes(each.lean.peak)} at least, {format_bytes(over)} over the memory limit"
            if over <= 0:
                why = "its blocks fit, but not where unlike ones meet"
        else:
            why = "refused"
        rows.append(
            {
                "structure": each.structure.name,
                "seconds": assignment.seconds if assignment else None,
                "peak": assignment.peak if assignment else None,
                "fits": fits,
                "blocks": told(each, assignment) if assignment else None,
                "why_not": why,
            }
        )
    return rows


def curve_table(points: tuple[Point, ...], knobs: tuple[Knob, ...], chosen: Point) -> Table:
    """What memory buys, and which step down gives most GiB per millisecond; where the curve is straight, its ends."""
    rank = {knob.to: place for place, knob in enumerate(knobs, 1)}
    gives = {knob.to: knob.gib_per_ms for knob in knobs}
    table = Table(title="what memory buys (the fastest at each peak)", title_justify="left")
    for head, justify in (
        ("peak", "right"), ("step", "right"), ("GiB per ms", "right"), ("rank", "right"),
        ("structure", "left"), ("blocks", "left"),
    ):  # fmt: skip
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for place, point in enumerate(points):
        if point == chosen or not _straight(points, place, gives):
            knob = f"{gives[point]:.3g}" if point in gives else ""
            number = "the plan" if point == chosen else str(rank.get(point, ""))
            table.add_row(format_bytes(point.peak), _ms(point.seconds), knob, number, point.structure, point.blocks)
    return table


def _straight(points: Sequence[Point], place: int, gives: Mapping[Point, float]) -> bool:
    """Whether the curve goes on at a point as it came: the same structure, as many GiB for each millisecond."""
    if not 0 < place < len(points) - 1:
        return False
    before, here, after = points[place - 1 : place + 2]
    alike = before.structure == here.structure == after.structure
    return alike and here in gives and after in gives and f"{gives[here]:.3g}" == f"{gives[after]:.3g}"


def distances(found: Found) -> list[Distance]:
    """How far each distinct site is from its bounds."""
    plan, problem = found.plan, found.problem
    kept = found.candidate.structure.keep or found.candidate.structure.level != "parameters"
    seen: dict[tuple[Any, ...], Distance] = {}
    for site in problem.sites(plan.accumulation):
        layout = plan.layout_for(site)
        seen.setdefault((site.kind, site.k, site.n, layout), distance(site, layout, plan.mesh, kept))
    return list(seen.values())


def distance_table(found: Found) -> Table:
    """The same as a table."""
    table = Table(title="how far each site is from the least that its product can move", title_justify="left")
    table.add_column("site")
    for head in ("grid m×n×k", "forward / bound", "training / best grid", "best grid"):
        table.add_column(head, justify="right")
    for each in distances(found):
        table.add_row(
            each.site, _grid(each.grid), f"{each.forward_ratio:.2f}", f"{each.training_ratio:.2f}", _grid(each.best)
        )
    return table


def _grid(grid: Grid) -> str:
    return f"{grid.m}×{grid.n}×{grid.k}"


def found_json(found: Found, points: tuple[Point, ...], knobs: tuple[Knob, ...]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "plan": found.plan.model_dump(mode="json"),
        "global_batch": found.plan.global_batch,
        "objective": found.plan.objective,
        "bound": found.bound,
        "gap": found.plan.gap,
        "memory": found.problem.memory,
        "peak": found.certificate.peak_bytes,
        "composed": found.composed.expected(),
        "solve_time": found.plan.solve_time,
        "candidates": candidates_json(found),
        "left": [{"structure": each.structure.name, "bound": each.formula_bound.seconds} for each in found.left],
        "curve": [_point(point) for point in points],
        "knobs": [{"saved": k.saved, "lost": k.lost, "gib_per_ms": k.gib_per_ms, "to": _point(k.to)} for k in knobs],
        "sites": [
            {
                "site": each.site,
                "grid": [each.grid.m, each.grid.n, each.grid.k],
                "forward": each.forward,
                "bound": each.bound,
                "training": each.training,
                "best": [each.best.m, each.best.n, each.best.k],
                "best_training": each.best_training,
            }
            for each in distances(found)
        ],
    }


def _point(point: Point) -> dict[str, Any]:
    return {"peak": point.peak, "seconds": point.seconds, "structure": point.structure, "blocks": point.blocks}


def curve_svg(points: tuple[Point, ...], memory: int, chosen: Point) -> str:
    """The curve as a picture: GiB to the right, milliseconds upward; the memory limit is a line, the plan a ring."""
    width, height, left, bottom = 720, 360, 70, 50
    gib = [point.peak / 2**30 for point in points] + [memory / 2**30]
    ms = [point.seconds * 1e3 for point in points]
    x0, x1, y0, y1 = min(gib) * 0.95, max(gib) * 1.05, min(ms) * 0.97, max(ms) * 1.03

    def at(peak: float, seconds: float) -> tuple[float, float]:
        x = left + (peak / 2**30 - x0) / (x1 - x0) * (width - left - 20)
        y = height - bottom - (seconds * 1e3 - y0) / (y1 - y0) * (height - bottom - 20)
        return round(x, 1), round(y, 1)

    line = " ".join(f"{x},{y}" for x, y in (at(point.peak, point.seconds) for point in points))
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="#3366aa"><title>{_title(point)}</title></circle>'
        for point in points
        for x, y in (at(point.peak, point.seconds),)
    )
    bx, _ = at(memory, points[0].seconds)
    cx, cy = at(chosen.peak, chosen.seconds)
    labels = "".join(
        f'<text x="{at(tick * 2**30, 0)[0]}" y="{height - bottom + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in _ticks(x0, x1)
    ) + "".join(
        f'<text x="{left - 8}" y="{at(0, tick / 1e3)[1] + 4}" text-anchor="end">{tick:g}</text>'
        for tick in _ticks(y0, y1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<path d="M{left},20V{height - bottom}H{width - 20}" fill="none" stroke="black"/>'
        f'<line x1="{bx}" y1="20" x2="{bx}" y2="{height - bottom}" stroke="#aa3333" stroke-dasharray="4 3"/>'
        f'<text x="{bx - 4}" y="32" text-anchor="end" fill="#aa3333">memory limit</text>'
        f'<polyline points="{line}" fill="none" stroke="#3366aa"/>{dots}'
        f'<circle cx="{cx}" cy="{cy}" r="6" fill="none" stroke="#aa3333" stroke-width="2"/>'
        f'{labels}<text x="{width / 2}" y="{height - 10}" text-anchor="middle">peak of a device, GiB</text>'
        f'<text x="16" y="{height / 2}" transform="rotate(-90 16 {height / 2})" text-anchor="middle">step, ms</text>'
        "</svg>\n"
    )


def _title(point: Point) -> str:
    text = f"{format_bytes(point.peak)}, {_ms(point.seconds)}: {point.structure}; {point.blocks}"
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _ticks(low: float, high: float) -> list[float]:
    """Some five round numbers between two."""
    step = 10.0 ** len(str(int(high - low))) / 10
    while (high - low) / step < 4:
        step /= 2
    first = int(low / step) + 1
    return [round(first * step + i * step, 6) for i in range(int((high - first * step) / step) + 1)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"
