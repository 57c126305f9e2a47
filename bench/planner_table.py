"""Prints what bench/planner.py found as Markdown: python bench/planner_table.py build/bench/planner.json"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from table import DISTURBED, line, mark, median, spread

CORRELATION, LOSS = 0.9, 0.05  # the goals


def markdown(results: dict[str, Any]) -> str:
    """A table for each machine: every layout measured and predicted, the fastest first."""
    return "\n\n".join(_table(group, rate) for group in results["groups"] for rate in group["variants"][0]["timed"])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the places in order, equal values sharing theirs."""
    return statistics.correlation(_places(first), _places(second))


def _places(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def _table(group: dict[str, Any], rate: str) -> str:
    variants = sorted(group["variants"], key=lambda variant: median(variant, rate))
    heads = ["layout", "measured ms", "predicted ms", "ratio", "of it compute", "sent MiB"]
    lines = [f"**{group['hosts']} hosts × {group['ranks']}, {rate} Gbit/s**", "", line(heads), line(["---"] * 6)]
    for variant in variants:
        predicted = variant["predicted"]
        lines.append(
            line(
                [
                    variant["name"],
                    f"{median(variant, rate):.0f} ({spread(variant, rate):.0f})",
                    f"{predicted['ms']:.0f}",
                    f"{predicted['ms'] / median(variant, rate):.2f}",
                    f"{predicted['compute_ms']:.0f}",
                    f"{predicted['sent'] / 2**20:.1f}",
                ]
            )
        )
    measured = [median(variant, rate) for variant in variants]
    predicted = [variant["predicted"]["ms"] for variant in variants]
    correlation = rank_correlation(measured, predicted)
    chosen = measured[predicted.index(min(predicted))]
    loss = chosen / measured[0] - 1
    lines += [
        "",
        f"Rank correlation {correlation:.3f} over {len(variants)} layouts (≥ {CORRELATION}: "
        f"{mark(correlation >= CORRELATION)}); the predicted fastest takes {loss:.1%} longer than the measured fastest "
        f"(≤ {LOSS:.0%}: {mark(loss <= LOSS)}).",
        _disturbance(variants, rate),
    ]
    return "\n".join(lines)


def _disturbance(variants: Sequence[dict[str, Any]], rate: str) -> str:
    """What share of the processors other programs took meanwhile."""
    every = [share for variant in variants for share in variant["timed"][rate]["foreign"]]
    disturbed = sum(share > DISTURBED for share in every)
    return (
        f"In {disturbed} of {len(every)} steps other programs took over a tenth of the processors "
        f"(median {statistics.median(every):.0%})."
    )


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
