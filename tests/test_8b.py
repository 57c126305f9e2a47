"""The ledger of Llama 3.1 8B, through the command that users type: numbers by formula, and what making them takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = json.loads((Path(__file__).parent / "data" / "model_configs.json").read_text())["meta-llama/Meta-Llama-3.1-8B"]


def rehearsed(tmp_path: Path, layout: str) -> dict:
    config, figures = tmp_path / "config.json", tmp_path / f"{layout}.json"
    config.write_text(json.dumps(CONFIG["config"]))
    sizes = ["--mesh", "data=1,tensor=4", "--micro-batch", "1", "--sequence", "4096", "--master-dtype", "bf16"]
    command = [sys.executable, "-m", "shardwright", "rehearse", config, "--layout", layout, *sizes, "--json", figures]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    return json.loads(figures.read_text())


@pytest.mark.slow
def test_8b_gathering_again_saves_what_the_formula_says(tmp_path):
    keep, again = (rehearsed(tmp_path, layout) for layout in ("sequence-parallel-keep", "sequence-parallel"))
    n, tokens, h, blocks = 4, 4096, 4096, 32
    assert keep["ledger"][0]["saved"] - again["ledger"][0]["saved"] == (2 * blocks + 1) * tokens * h * 2 * (n - 1) // n
    # Weights, gradients and moments: everything split but the norms; a step count of 4 bytes a tensor.
    norms = (2 * blocks + 1) * h
    local = (CONFIG["parameters"] - norms) // n + norms
    done = {(point["step"], point["name"]): point["categories"] for point in again["ledger"][0]["points"]}
    assert done[1, "start"]["parameter"] == 2 * local
    assert done[1, "after backward"]["gradient"] == 2 * local
    assert done[1, "after step"]["optimizer"] == 4 * local + 4 * (9 * blocks + 3)
    assert done[2, "done"] == {**done[1, "done"], "input": 2 * done[1, "done"]["input"], "temporary": 8}
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak_kib < 2 * 2**20, "a rehearsal of 8B takes under 2 GiB of this machine's memory"
