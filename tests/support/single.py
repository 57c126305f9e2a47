"""The fastest grid for one linear: when one dimension is enough, and when two or three pay.

Every way to write the ranks as pm × pn × pk, and every choice of what X, W and Y do on axes that they do not need, is
priced by its formulas: the products and, one after the other, what formulas/volume.py says travels in both passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.errors import DoesNotFit
from shardwright.formulas.bounds import Grid, grids
from shardwright.formulas.place import Here
from shardwright.formulas.volume import site_volume
from shardwright.simulate.machine import Machine
from shardwright.spec.cluster import Cluster
from shardwright.spec.dtypes import FLOATS
from shardwright.spec.layout import GridLayout
from shardwright.spec.site import Site

AXES = ("i", "j", "l")
"""Mesh axes that split M, N and K, in mesh order."""


@dataclass(frozen=True)
class Single:
    """One layout of one linear: seconds of forward and backward, and bytes that a rank holds at most.

    memory: W and dW as stored, X and Y as they come and go, what is saved, and the larger transient.
    """

    grid: Grid
    layout: GridLayout
    seconds: float
    memory: int

    @property
    def dimensions(self) -> int:
        """How many of M, N and K are split."""
        return sum(ranks > 1 for ranks in (self.grid.m, self.grid.n, self.grid.k))


def fastest_single(site: Site, cluster: Cluster, memory: int, dtype: str, backend: str) -> Single:
    """The fastest layout of ``site`` on all devices within ``memory`` bytes each; of equals, that of fewest dimensions.

    Raises DoesNotFit where none fits, naming the least that one needs.
    """
    found = list(singles(site, cluster, dtype, backend))
    fitting = [each for each in found if each.memory <= memory]
    if not fitting:
        least = min(each.memory for each in found)
        raise DoesNotFit(f"memory: found {memory:,} bytes; allowed: at least {least:,} for {site.name}")
    return min(fitting, key=lambda each: (each.seconds, each.dimensions, each.memory))


def singles(site: Site, cluster: Cluster, dtype: str, backend: str) -> Iterator[Single]:
    """Every layout of the site on all devices of the cluster, priced."""
    for grid in grids(cluster.devices):
        mesh = dict(zip(AXES, (grid.m, grid.n, grid.k), strict=True))
        machine = Machine(cluster, mesh, dtype, backend)
        for layout in _layouts(grid):
            yield _single(site, grid, layout, machine)


def _layouts(grid: Grid) -> Iterator[GridLayout]:
    """What each operand may do on its missing axis; where that has one rank, there is nothing to choose."""
    x = ("sharded", "replicated") if grid.n > 1 else ("sharded",)
    w = ("sharded", "replicated") if grid.m > 1 else ("replicated",)
    y = ("sharded", "replicated") if grid.k > 1 else ("sharded",)
    for words in itertools.product(x, w, y):
        for save_x in ("gathered", "shard") if grid.n > 1 and words[0] == "sharded" else ("shard",):
            yield GridLayout(m="i", n="j", k="l", x=words[0], w=words[1], y=words[2], save_x=save_x)  # type: ignore[arg-type]


def _single(site: Site, grid: Grid, layout: GridLayout, machine: Machine) -> Single:
    place, element = dict.fromkeys(AXES, 0), FLOATS[machine.dtype]
    here = Here(machine.mesh, place)
    volume = site_volume(site, layout, machine.mesh, place, element=element, backend=machine.backend)
    rows, k = here.cut(site.m, layout.m), here.cut(site.k, layout.k)
    columns = [here.cut(linear.n, layout.n) for linear in site.linears]
    products = 3 * sum(machine.product(rows, n, k) for n in columns)
    moves = (*volume.forward, *volume.backward)
    travels = sum(machine.collective(move.kind, move.axes, move.size, move.sent) for move in moves)
    stored = sum(columns) * k // (grid.m if layout.w == "sharded" else 1)
    x = rows * k // (grid.n if layout.x == "sharded" else 1)
    y = rows * sum(columns) // (grid.k if layout.y == "sharded" else 1)
    transient = max(volume.transient_forward, volume.transient_backward)
    held = (2 * stored + x + y) * element + volume.saved + transient
    return Single(grid, layout, products + travels, held)
