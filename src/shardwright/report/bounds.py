"""What the products of a model's sites move, beside the least that they could: per site, or for the best grids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from shardwright.formulas.bounds import best_grid, lower_bound, ratio
from shardwright.spec.site import Site
from shardwright.trace import Trace


def bounds_table(sites: Iterable[Site], ranks: Sequence[int], tokens: Sequence[int]) -> Table:
    """The best grid of each product on each number of ranks and tokens: words moved forward, the bound, their ratio."""
    table = Table(title="One forward product on the best grid, words a rank")
    for head in ("site", "N", "K", "ranks", "tokens", "grid m×n×k", "moved", "bound", "ratio"):
        table.add_column(head, justify="left" if head == "site" else "right")
    for name, n, k in dict.fromkeys((_kind(site.name), site.n, site.k) for site in sites):
        for world in ranks:
            for m in tokens:
                grid, bound = best_grid(m, n, k, world), lower_bound(m, n, k, world)
                moved = grid.moved(m, n, k)
                sizes = (f"{number:,}" for number in (n, k, world, m))
                shape = f"{grid.m}×{grid.n}×{grid.k}"
                table.add_row(name, *sizes, shape, f"{moved:,.0f}", f"{bound:,.0f}", f"{ratio(moved, bound):.3f}")
    return table


def sites_json(
    trace: Trace, sites: Sequence[Site], world: int, element: int, micro_batches: int
) -> list[dict[str, Any]]:
    """What each site moves in one micro-batch of step 1 of ``trace``; equal sites of several blocks are one entry.

    Each entry: site, count, forward and backward (bytes sent for the site itself; those of a unit of parameters that is
    larger than a site are not its own), bound (bytes, of one forward product), ratio (forward to bound).
    """
    sent = {(site.name, phase): 0 for site in sites for phase in ("forward", "backward")}
    for move in trace.collectives:
        if move.step == 1 and (move.module, move.phase) in sent:
            sent[move.module, move.phase] += move.sent
    found: dict[tuple[Any, ...], int] = {}
    for site in sites:
        forward, backward = (sent[site.name, phase] // micro_batches for phase in ("forward", "backward"))
        bound = round(lower_bound(site.m, site.n, site.k, world) * element)
        key = (_kind(site.name), forward, backward, bound)
        found[key] = found.get(key, 0) + 1
    return [
        {
            "site": name,
            "count": count,
            "forward": forward,
            "backward": backward,
            "bound": bound,
            "ratio": ratio(forward, bound),
        }
        for (name, forward, backward, bound), count in found.items()
    ]


def sites_table(entries: Sequence[dict[str, Any]]) -> Table:
    """``sites_json`` as a table."""
    table = Table(title="Bytes a rank sends for each site in a micro-batch, beside the bound of the forward product")
    for head in ("site", "sites", "forward", "backward", "bound", "forward/bound"):
        table.add_column(head, justify="left" if head == "site" else "right")
    for entry in entries:
        numbers = (f"{entry[key]:,}" for key in ("count", "forward", "backward", "bound"))
        table.add_row(entry["site"], *numbers, f"{entry['ratio']:.2f}")
    return table


def _kind(name: str) -> str:
    """The name without its block's number."""
    return re.sub(r"^.*\.\d+\.", "*.", name)
