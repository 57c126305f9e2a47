"""Prints what bench/grid.py found as Markdown: python bench/grid_table.py build/bench/grid.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from table import DISTURBED, MIB, line, mark, median, spread

FP32 = 4


def markdown(results: dict[str, Any]) -> str:
    """Two tables for each grid: what was measured, as medians (interquartile range), and ours beside axonn's."""
    return "\n\n".join(
        text for group in results["groups"] for text in (_table(group, results["task"]), _beside(group)) if text
    )


def share(group: dict[str, Any], task: dict[str, Any], variant: dict[str, Any]) -> float:
    """Saved bytes in units of 1/P of what one process would save: X, and the input of the second linear."""
    whole = FP32 * task["tokens"] * (task["width"] + task["hidden"])
    return variant["saved"] * group["hosts"] * group["ranks"] / whole


def _table(group: dict[str, Any], task: dict[str, Any]) -> str:
    rates = list(group["variants"][0]["timed"])
    heads = ["variant", "keeps", *(f"{rate} Gbit/s: ms" for rate in rates), "processor ms", "link MiB", "wire MiB"]
    heads += ["peak MiB", "saved MiB", "saved × P / whole", "transient MiB"]
    grid = "×".join(str(size) for size in group["grid"])
    lines = [f"**i × j × l = {grid}, {group['hosts']} hosts × {group['ranks']}**", ""]
    lines += [line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        cells = [variant["name"], variant["saves"]]
        cells += [f"{median(variant, rate):.0f} ({spread(variant, rate):.0f})" for rate in rates]
        cells.append(f"{median(variant, rates[-1], 'processor_ms'):.0f}")
        cells += [f"{variant[key] / MIB:.1f}" for key in ("link", "wire", "peak", "saved")]
        cells += [f"{share(group, task, variant):.2f}", f"{variant['transient'] / MIB:.1f}"]
        lines.append(line(cells))
    every = [share for v in group["variants"] for timed in v["timed"].values() for share in timed["foreign"]]
    disturbed = sum(share > DISTURBED for share in every)
    lines += ["", f"In {disturbed} of {len(every)} steps other programs took over a tenth of the processors."]
    lines += [f"Not run: {line}" for line in group["missing"]]
    return "\n".join(lines)


def _beside(group: dict[str, Any]) -> str:
    """Each of ours as a ratio to the best of axonn's variants, quantity by quantity; empty where axonn did not run."""
    peers = [variant for variant in group["variants"] if variant["family"] == "axonn"]
    if not peers:
        return ""
    rates = list(peers[0]["timed"])
    heads = ["variant", "keeps", "step < 1", "link", "wire", "peak", "saved", "transient"]
    lines = [f"Ratios to axonn's best, at {', '.join(rates)} Gbit/s:", "", line(heads), line(["---"] * len(heads))]
    for variant in group["variants"]:
        if variant["family"] != "ours":
            continue
        steps = [median(variant, rate) / min(median(peer, rate) for peer in peers) for rate in rates]
        cells = [variant["name"], variant["saves"], " · ".join(f"{step:.2f} {mark(step < 1)}" for step in steps)]
        cells += [
            f"{variant[key] / min(peer[key] for peer in peers):.2f}"
            for key in ("link", "wire", "peak", "saved", "transient")
        ]
        lines.append(line(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
