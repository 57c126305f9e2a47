"""How far a site is from the least that its product can move: of the forward product, and of training.

A site's layout is a grid of pm × pn × pk ranks (formulas/bounds.py), and every operand lies in parts somewhere over all
of them. What it moves in a forward product is compared with the lower bound; what it moves in training (forward,
backward, and what is gathered again) with the best grid of as many ranks that a real machine could have. Words, not
bytes, of one rank, by THEORY's formula: V = x·(a − A) + w·(b − B) + 2·(c − C), with x and w 2 where the gathered tensor
is kept, 3 where it is gathered again. A gradient that is all-reduced moves as much as one that is gathered and
reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.formulas.bounds import Grid, grids, lower_bound, ratio
from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import size_along
from shardwright.spec.site import Site


@dataclass(frozen=True)
class Distance:
    """Of one site: its grid, words moved in a forward product and in training, and the least of each."""

    site: str
    grid: Grid
    forward: float
    bound: float
    training: float
    best: Grid
    best_training: float

    @property
    def forward_ratio(self) -> float:
        """Moved in a forward product / the lower bound."""
        return ratio(self.forward, self.bound)

    @property
    def training_ratio(self) -> float:
        """Moved in training / what the best real grid moves."""
        return ratio(self.training, self.best_training)


def training(grid: Grid, m: int, n: int, k: int, x: int = 3, w: int = 3) -> float:
    """Words that a rank moves in forward and backward. x, w: 2 where the gathered X (W) is kept, 3 where it is not."""
    ranks = grid.ranks
    a, b, c = m * k / (grid.m * grid.k), n * k / (grid.n * grid.k), m * n / (grid.m * grid.n)
    return x * (a - m * k / ranks) + w * (b - n * k / ranks) + 2 * (c - m * n / ranks)


def distance(site: Site, layout: GridLayout, mesh: Mapping[str, int], kept_w: bool) -> Distance:
    """The distance of a site under a layout. kept_w: whether a gathered W is kept until backward."""

    def ranks(axes: tuple[str, ...]) -> int:
        return size_along(mesh, axes)

    grid = Grid(ranks(layout.m), ranks(layout.n), ranks(layout.k))
    m, n, k = site.m, site.n, site.k
    words = (2 if layout.save_x == "gathered" else 3, 2 if kept_w else 3)
    best = min(grids(grid.ranks), key=lambda each: (training(each, m, n, k, *words), -each.m, -each.n))
    return Distance(
        site.name,
        grid,
        grid.moved(m, n, k),
        lower_bound(m, n, k, grid.ranks),
        training(grid, m, n, k, *words),
        best,
        training(best, m, n, k, *words),
    )
