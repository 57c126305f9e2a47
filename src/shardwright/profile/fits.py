"""The line seconds = max(least, latency + sent / bandwidth) that lies nearest to measurements of which some are wrong.

What it costs to begin a message does not always come on top of its bytes: while programs wake each other up, a larger
message travels already. Such times are flat at first, at ``least``, and then go with the bytes.

Nearest is the least sum of relative distances |1 − line / measured|: sizes from a KiB to MiB weigh alike, and a
measurement that something else slowed down, however much, counts as 1 at most (so several large messages are needed:
one that a line through small ones misses would count as such). Such a line can be found among those
through two of the points (or through one and a bound of what it may be), flat up to one of the points (or nowhere), so
all of these are tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

NO_LIMIT = 1e15
"""Bytes per second of messages whose time does not grow with their size."""


@dataclass(frozen=True)
class Line:
    """seconds = max(least, latency + sent / bandwidth). residual: median relative distance of a measurement from it."""

    latency: float
    bandwidth: float
    least: float = 0.0
    residual: float = 0.0

    def seconds(self, sent: float) -> float:
        """What a message of ``sent`` bytes takes."""
        return max(self.least, self.latency + sent / self.bandwidth)

    def distances(self, sent: Sequence[float], seconds: Sequence[float]) -> list[float]:
        """How far each measurement is from the line, relative to what was measured."""
        return [abs(1 - self.seconds(size) / found) for size, found in zip(sent, seconds, strict=True)]


def fit(sent: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line of least relative distance; latency ≥ 0, 0 < bandwidth ≤ NO_LIMIT.

    sent: bytes, above 0; seconds: what each took, above 0. At least one measurement. Of equally near lines (to nine
    decimals) it is one without ``least``.
    """
    slopes = list(_candidates(sorted(zip(sent, seconds, strict=True))))
    lines = [replace(line, least=least) for least in (0.0, *seconds) for line in slopes]
    best = min(lines, key=lambda line: round(sum(line.distances(sent, seconds)), 9))
    return replace(best, residual=statistics.median(best.distances(sent, seconds)))


def _candidates(points: Sequence[tuple[float, float]]) -> Iterator[Line]:
    for size, found in points:
        yield Line(0.0, size / found)
        yield Line(found, NO_LIMIT)
    for (small, first), (large, second) in combinations(points, 2):
        if large > small and second > first:
            slope = (second - first) / (large - small)
            latency = first - small * slope
            if latency >= 0 and slope >= 1 / NO_LIMIT:
                yield Line(latency, 1 / slope)
