"""The least that one product must move, and the grid that comes closest. Words, not bytes; one rank's share.

Y[M,N] = X[M,K] · W[N,K]ᵀ on P ranks, each operand stored once over all of them. m ≥ n ≥ k are M, N, K sorted. Some rank
moves at least D − S words, where S = (mn + mk + nk)/P is what it holds anyway, and

| ranks             | D                       | the best grid splits |
|-------------------|-------------------------|----------------------|
| P ≤ m/n           | (mn + mk)/P + nk        | m                    |
| m/n ≤ P ≤ mn/k²   | 2·√(mnk²/P) + mn/P      | m and n              |
| mn/k² ≤ P         | 3·(mnk/P)^(2/3)         | all three            |

H. Al Daas, G. Ballard, L. Grigori, S. Kumar, K. Rouse: Tight memory-independent parallel matrix multiplication
communication lower bounds, SPAA 2022, arXiv 2205.13407. A grid (pm, pn, pk) that gathers X and W and reduce-scatters Y
moves a + b + c − S with the faces a = MK/(pm·pk), b = KN/(pn·pk), c = MN/(pm·pn): the bound exactly, where P can be
factored as the real optimum asks (R. C. Agarwal et al., 1995).

With room for Z words a rank also moves at least 2·MNK/(P·√Z), to leading order (D. Irony, S. Toledo, A. Tiskin, 2004);
that is more than D where Z < (4/9)·(MNK/P)^(2/3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """How many ranks split M, N and K."""

    m: int
    n: int
    k: int

    @property
    def ranks(self) -> int:
        """P."""
        return self.m * self.n * self.k

    def moved(self, m: int, n: int, k: int) -> float:
        """Words that a rank moves in one forward product: X gathered over n, W over m, Y reduce-scattered over k."""
        x, w, y = m * k / (self.m * self.k), k * n / (self.n * self.k), m * n / (self.m * self.n)
        return (1 - 1 / self.n) * x + (1 - 1 / self.m) * w + (1 - 1 / self.k) * y


def lower_bound(m: int, n: int, k: int, ranks: int) -> float:
    """D − S: words that some rank must move, whatever its memory."""
    k, n, m = sorted((m, n, k))
    held = (m * n + m * k + n * k) / ranks
    if ranks <= m / n:
        touched = (m * n + m * k) / ranks + n * k
    elif ranks <= m * n / k**2:
        touched = 2 * math.sqrt(m * n * k**2 / ranks) + m * n / ranks
    else:
        touched = 3 * (m * n * k / ranks) ** (2 / 3)
    return touched - held


def grids(ranks: int) -> Iterator[Grid]:
    """Every way to write P as a product of three."""
    for m in _divisors(ranks):
        for n in _divisors(ranks // m):
            yield Grid(m, n, ranks // m // n)


def best_grid(m: int, n: int, k: int, ranks: int) -> Grid:
    """The grid that moves least in one forward product; of equals, the one that splits M most."""
    return min(grids(ranks), key=lambda grid: (grid.moved(m, n, k), -grid.m, -grid.n))


def ratio(moved: float, bound: float) -> float:
    """How many times the bound; 1 where both are nothing."""
    return moved / bound if bound > 0 else 1.0 if moved <= 0 else math.inf


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
