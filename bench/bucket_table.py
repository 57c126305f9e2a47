"""Prints what bench/bucket.py found as Markdown: python bench/bucket_table.py build/bench/bucket.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from table import DISTURBED, MIB, line, mark, median, spread

PHASES = ("forward", "backward", "step")


def markdown(results: dict[str, Any]) -> str:
    """A table for each number of ranks: medians (interquartile range), and the goals."""
    return "\n\n".join(text for group in results["groups"] for text in (_table(group), _verdict(group)))


def _table(group: dict[str, Any]) -> str:
    rates = list(group["variants"][0]["timed"])
    heads = [
        "variant",
        *(f"{rate} Gbit/s: ms" for rate in rates),
        "collectives",
        "reductions",
        "launches",
        "sent MiB",
        "peak MiB",
    ]
    heads += [*(f"in {phase}" for phase in PHASES), "bucket MiB", "carried MiB", "after the step"]
    lines = [f"**{group['hosts']} hosts × {group['ranks']}**", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        cells = [variant["name"]]
        cells += [f"{median(variant, rate):.0f} ({spread(variant, rate):.0f})" for rate in rates]
        cells += [f"{variant[key]:.0f}" for key in ("collectives", "reductions", "launches")]
        cells.append(f"{median(variant, rates[-1], 'sent') / MIB:.1f}")
        keys = ["peak", *(f"peak in {phase}" for phase in PHASES), "bucket", "carried", "outside"]
        cells += [f"{variant[key] / MIB:.1f}" for key in keys]
        lines.append(line(cells))
    every = [share for v in group["variants"] for timed in v["timed"].values() for share in timed["foreign"]]
    disturbed = sum(share > DISTURBED for share in every)
    return "\n".join(
        [*lines, "", f"In {disturbed} of {len(every)} steps other programs took over a tenth of the processors."]
    )


def _verdict(group: dict[str, Any]) -> str:
    """The goals, cap by cap: met, or by how much not."""
    peers = [variant for variant in group["variants"] if variant["family"] == "peer"]
    rates = list(peers[0]["timed"])
    least = min(peer["peak"] for peer in peers)
    heads = ["variant", "outside of backward = 0 B", "peak / least peer's < 1", "step / fastest peer's ≤ 1"]
    lines = [f"Goals, at {', '.join(rates)} Gbit/s:", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        if variant["family"] != "ours":
            continue
        times = [median(variant, rate) / min(median(peer, rate) for peer in peers) for rate in rates]
        memory = variant["peak"] / least
        cells = [
            variant["name"],
            f"{variant['outside']:.0f} {mark(variant['outside'] == 0)}",
            f"{memory:.2f} {mark(memory < 1)}",
            " · ".join(f"{ratio:.2f} {mark(ratio <= 1)}" for ratio in times),
        ]
        lines.append(line(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
