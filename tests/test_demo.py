"""The demo: its batch, and the whole of it on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.demo.run import global_batch
from shardwright.spec.cluster import Cluster


def test_global_batch_is_the_nearest_multiple() -> None:
    assert [global_batch(ranks) for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)] == [8, 8, 9, 8, 10, 6, 7, 8, 12, 16]


@pytest.mark.slow
def test_from_profile_to_measured_peaks(tmp_path: Path) -> None:
    """Exit status 0 says that rehearsed and measured peaks are equal; within the limit and at the level asked for."""
    words = ["--ranks", "2", "--steps", "3", "--memory", "60MiB", "--level", "parameters"]
    command = [sys.executable, "-m", "shardwright", "demo", *words, "--output", str(tmp_path / "kept")]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rehearsed_peak"] == figures["measured_peak"] and max(figures["measured_peak"]) <= 60 * 2**20
    assert {stored["level"] for stored in figures["plan"]["params"].values()} == {"parameters"}
    assert figures["plan"]["predicted"]["peak"]["backward"] <= 60 * 2**20
    assert len(figures["losses"]) == 3 and min(figures["step_seconds"].values()) > 0
    assert sum(each["why_not"] == "this is the plan" for each in figures["candidates"]) == 1
    assert Cluster.load(tmp_path / "kept" / "cluster.yaml").devices == 2
