"""Prints what bench/linear.py found as Markdown: python bench/table.py build/bench/linear.json"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
DISTURBED = 0.1  # the share of the processors that other programs may take during a step


def markdown(results: dict[str, Any]) -> str:
    """Two tables for each number of ranks: what was measured, as medians (interquartile range), and the goals."""
    return "\n\n".join(text for group in results["groups"] for text in (_table(group), _verdict(group)))


def median(variant: dict[str, Any], rate: str, key: str = "ms") -> float:
    """Of the rounds at that rate."""
    return statistics.median(variant["timed"][rate][key])


def spread(variant: dict[str, Any], rate: str) -> float:
    """The interquartile range of the step time."""
    low, _, high = statistics.quantiles(variant["timed"][rate]["ms"], n=4, method="inclusive")
    return high - low


def hidden_share(group: dict[str, Any], variant: dict[str, Any], rate: str) -> float | None:
    """(blocking − mode) / (blocking − compute alone): what part of the communication's time no longer shows."""
    if variant["family"] != "ours" or variant["name"] == "blocking":
        return None
    blocking = find(group, "blocking", variant["saves"])
    shown = median(blocking, rate) - median(find(group, "compute alone"), rate)
    return (median(blocking, rate) - median(variant, rate)) / shown


def hidable(group: dict[str, Any], variant: dict[str, Any], rate: str) -> float:
    """The hidden share if the step took no longer than the longest of: its products alone, its bytes on the link, all
    that the processors do for it (ranks share them).
    """
    alone, blocking = (median(find(group, *key), rate) for key in (("compute alone",), ("blocking", variant["saves"])))
    wire = median(variant, rate, "sent") * group["ranks"] * 8 / (float(rate) * 1e9) * 1e3
    work = median(variant, rate, "processor_ms") * group["hosts"] * group["ranks"] / group["cores"]
    return (blocking - max(alone, wire, work)) / (blocking - alone)


def find(group: dict[str, Any], name: str, saves: str | None = None) -> dict[str, Any]:
    """The variant of that name."""
    return next(v for v in group["variants"] if v["name"] == name and saves in (None, v["saves"]))


def _table(group: dict[str, Any]) -> str:
    rates = list(group["variants"][0]["timed"])
    heads = ["variant", "keeps", *(f"{rate} Gbit/s: ms" for rate in rates), "hidden", "processor ms", "sent MiB"]
    heads += ["peak MiB", "saved MiB", "transient MiB", "buffers MiB"]
    lines = [f"**{group['hosts']} hosts × {group['ranks']}**", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        cells = [variant["name"], variant["saves"]]
        cells += [f"{median(variant, rate):.0f} ({spread(variant, rate):.0f})" for rate in rates]
        shares = [hidden_share(group, variant, rate) for rate in rates]
        cells.append(" · ".join("–" if share is None else f"{share:.2f}" for share in shares))
        cells.append(f"{median(variant, rates[-1], 'processor_ms'):.0f}")
        cells.append(f"{median(variant, rates[-1], 'sent') / MIB:.1f}")
        cells += [f"{variant[key] / MIB:.1f}" for key in ("peak", "saved", "transient", "buffers")]
        lines.append(line(cells))
    every = [share for v in group["variants"] for timed in v["timed"].values() for share in timed["foreign"]]
    disturbed = sum(share > DISTURBED for share in every)
    lines += ["", f"In {disturbed} of {len(every)} steps other programs took over a tenth of the processors."]
    lines += [f"Not run: {line}" for line in group["missing"]]
    return "\n".join(lines)


def _verdict(group: dict[str, Any]) -> str:
    """The goals, mode by mode: met, or by how much not."""
    torchs = find(group, "torch")
    peers = [variant for variant in group["variants"] if variant["family"] in ("torch", "megatron")]
    rates = list(torchs["timed"])
    heads = ["variant", "keeps", "hidden ≥ 0.7", "can hide", "step / fastest peer's < 1"]
    heads += ["transient / torch's ≤ 0.5", "buffers / torch's ≤ 0.5"]
    lines = [f"Goals, at {', '.join(rates)} Gbit/s:", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        if variant["family"] != "ours" or variant["name"] == "blocking":
            continue
        shares, ratios = [], []
        for rate in rates:
            share = hidden_share(group, variant, rate) or 0.0
            shares.append(f"{share:.2f} {mark(share >= 0.7)}")
            ratio = median(variant, rate) / min(median(peer, rate) for peer in peers)
            ratios.append(f"{ratio:.2f} {mark(ratio < 1)}")
        memory = [variant[key] / torchs[key] for key in ("transient", "buffers")]
        limits = " · ".join(f"{hidable(group, variant, rate):.2f}" for rate in rates)
        cells = [variant["name"], variant["saves"], " · ".join(shares), limits, " · ".join(ratios)]
        lines.append(line(cells + [f"{part:.2f} {mark(part <= 0.5)}" for part in memory]))
    return "\n".join(lines)


def mark(met: bool) -> str:
    """Whether a goal is met."""
    return "✓" if met else "✗"


def line(cells: list[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
