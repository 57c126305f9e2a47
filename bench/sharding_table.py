"""Prints what bench/sharding.py found as Markdown: python bench/sharding_table.py build/bench/sharding.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from table import DISTURBED, MIB, line, mark, median, spread


def markdown(results: dict[str, Any]) -> str:
    """A table for each number of ranks: medians (interquartile range), and the goals."""
    return "\n\n".join(text for group in results["groups"] for text in (_table(group), _verdict(group)))


def find(group: dict[str, Any], name: str, family: str | None = None) -> dict[str, Any]:
    """The variant of that name."""
    return next(v for v in group["variants"] if v["name"] == name and family in (None, v["family"]))


def hidden_share(group: dict[str, Any], variant: dict[str, Any], rate: str) -> float:
    """(blocking − ours) / (blocking − compute alone), at the same level."""
    blocking = median(find(group, variant["name"], "blocking"), rate)
    return (blocking - median(variant, rate)) / (blocking - median(find(group, "compute alone"), rate))


def hidable(group: dict[str, Any], variant: dict[str, Any], rate: str) -> float:
    """The hidden share if the step took no longer than the longest of: its products alone, its bytes on the link, all
    that the processors do for it (ranks share them).
    """
    alone, blocking = (
        median(find(group, name, family), rate)
        for name, family in (("compute alone", None), (variant["name"], "blocking"))
    )
    wire = median(variant, rate, "sent") * group["ranks"] * 8 / (float(rate) * 1e9) * 1e3
    work = median(variant, rate, "processor_ms") * group["hosts"] * group["ranks"] / group["cores"]
    return (blocking - max(alone, wire, work)) / (blocking - alone)


def _table(group: dict[str, Any]) -> str:
    rates = list(group["variants"][0]["timed"])
    heads = ["variant", *(f"{rate} Gbit/s: ms" for rate in rates), "hidden", "sent MiB", "peak MiB", "transient MiB"]
    lines = [f"**{group['hosts']} hosts × {group['ranks']}**", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        cells = [variant["name"] + (", blocking" if variant["family"] == "blocking" else "")]
        cells += [f"{median(variant, rate):.0f} ({spread(variant, rate):.0f})" for rate in rates]
        ours = variant["family"] == "ours"
        cells.append(" · ".join(f"{hidden_share(group, variant, rate):.2f}" if ours else "–" for rate in rates))
        cells.append(f"{median(variant, rates[-1], 'sent') / MIB:.1f}")
        cells += [f"{variant[key] / MIB:.1f}" for key in ("peak", "transient")]
        lines.append(line(cells))
    every = [share for v in group["variants"] for timed in v["timed"].values() for share in timed["foreign"]]
    disturbed = sum(share > DISTURBED for share in every)
    return "\n".join(
        [*lines, "", f"In {disturbed} of {len(every)} steps other programs took over a tenth of the processors."]
    )


def _verdict(group: dict[str, Any]) -> str:
    """The goals, level by level: met, or by how much not."""
    fsdp2 = find(group, "FSDP2")
    rates = list(fsdp2["timed"])
    heads = [
        "level",
        "hidden ≥ 0.7",
        "can hide",
        "step / FSDP2's < 1",
        "step / FSDP2 + our reduce-scatter",
        "step / DDP's",
        "transient / FSDP2's ≤ 0.5",
    ]
    lines = [f"Goals, at {', '.join(rates)} Gbit/s:", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        if variant["family"] != "ours":
            continue
        shares = [hidden_share(group, variant, rate) for rate in rates]

        def against(name: str, variant: dict[str, Any] = variant) -> list[float]:
            return [median(variant, rate) / median(find(group, name), rate) for rate in rates]

        memory = variant["transient"] / fsdp2["transient"]
        lines.append(
            line(
                [
                    variant["name"],
                    " · ".join(f"{share:.2f} {mark(share >= 0.7)}" for share in shares),
                    " · ".join(f"{hidable(group, variant, rate):.2f}" for rate in rates),
                    " · ".join(f"{ratio:.2f} {mark(ratio < 1)}" for ratio in against("FSDP2")),
                    " · ".join(f"{ratio:.2f}" for ratio in against("FSDP2 + our reduce-scatter")),
                    " · ".join(f"{ratio:.2f}" for ratio in against("DDP")),
                    f"{memory:.2f} {mark(memory <= 0.5)}",
                ]
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
