"""What a rank of Llama 3.1 8B holds at each point of a step, for each level: by formula, and by rehearsal.

    python bench/levels.py [--ranks 8] [--sequence 4096] [--rows parameters ...]

bfloat16 on float32 masters, one sequence a rank, blocks recomputed; GiB, and GiB sent in step 2. No accelerator; a
row takes some seconds. Prints Markdown.
The script stops with 1 where a formula and a rehearsal differ by a byte.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.spec.mesh import chunk

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "model_configs.json"
MODEL = "meta-llama/Meta-Llama-3.1-8B"
GIB = 2**30
ROWS = {
    "replicate": "replicate",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "parameters": "parameters",
    "parameters, kept": {"level": "parameters", "keep": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    heads = ["level", "start", "after backward", "after step", "forward's peak", "backward's peak", "sent"]
    print("| " + " | ".join(heads) + " |\n| " + " | ".join(["---"] * len(heads)) + " |")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(json.loads(CONFIGS.read_text())[MODEL]["config"]))
        shapes = [tuple(p.shape) for p in build_meta(load_config(config)).parameters()]
        for name in options.rows:
            plan = sw.Plan.for_config(
                config,
                mesh={"data": options.ranks},
                layout="replicate",
                micro_batch=options.ranks,
                sequence=options.sequence,
                dtype="bfloat16",
                master_dtype="float32",
                params={"*": ROWS[name]},
                recompute={"*": "block"},
            )
            trace = sw.rehearse(config, plan, rank=0)
            found = {point.name: point for point in trace.points if point.step == 2}
            stated = formula(shapes, name, options.ranks)
            cells = [name]
            for point, expected in stated.items():
                rehearsed = sum(found[point].categories.get(key, 0) for key in ("parameter", "gradient", "optimizer"))
                wrong += rehearsed != expected
                cells.append(f"{expected / GIB:.2f}" + ("" if rehearsed == expected else f" (≠ {rehearsed / GIB:.2f})"))
            cells += [f"{trace.phase_peaks[phase] / GIB:.2f}" for phase in ("forward", "backward")]
            cells.append(f"{sum(c.sent for c in trace.collectives if c.step == 2) / GIB:.2f}")
            print("| " + " | ".join(cells) + " |", flush=True)
    return 1 if wrong else 0


def formula(shapes: list[tuple[int, ...]], name: str, ranks: int) -> dict[str, int]:
    """Bytes of parameters, gradients and moments at the points of step 2 on rank 0.

    P elements in all, S of them this rank's (rows of dimension 0, ⌈rows/N⌉ each): masters 4·S, moments 8·S (and 4 a
    parameter for the count of steps), gradients 4·S from backward to the end of the step; at the levels that keep W
    gathered 2·P beside them. At level replicate S is P.
    """
    elements = sum(math.prod(shape) for shape in shapes)
    own = elements
    if name != "replicate":
        own = sum(math.prod(shape[1:]) * chunk(shape[0], ranks, 0)[1] for shape in shapes)
    held = 12 * own + 4 * len(shapes)
    if name in ("optimizer", "gradients"):
        held += 2 * elements
    return {"start": held, "after backward": held + 4 * own, "after step": held + 4 * own}


if __name__ == "__main__":
    sys.exit(main())
