"""The rows of a benchmark: each in network namespaces of its own, where its script is started again as each rank."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """hosts, and ranks on each. given: further arguments of the script. facts: what tells the row in the results."""

    hosts: int
    ranks: int
    given: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, given: Sequence[str] = ()) -> Row:
        """``"2x4"``: two hosts of four ranks."""
        hosts, ranks = (int(size) for size in name.split("x"))
        return cls(hosts, ranks, given)


def run(script: Path, task: Mapping[str, Any], rates: Sequence[float], rows: Sequence[Row]) -> dict[str, Any]:
    """Runs ``script`` for every row; what its first ranks wrote, joined.

    task: options that all rows share. rates: Gbit/s that a host sends.
    """
    results: dict[str, Any] = {
        "task": dict(task),
        "software": {"python": platform.python_version(), "torch": torch.__version__},
        "groups": [],
    }
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    environment = {**os.environ, **quiet, "PYTHON": sys.executable}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            part = Path(folder, f"{number}.json")
            given = [f"--{key}={value}" for key, value in task.items()]
            given += [*row.given, "--rates", *map(str, rates), "--out", str(part)]
            command = [script.with_name("netlab.sh"), row.hosts, row.ranks, f"{rates[0]}gbit", script, *given]
            subprocess.run([str(word) for word in command], env=environment, check=True)
            shape = {**row.facts, "hosts": row.hosts, "ranks": row.ranks, "cores": os.cpu_count()}
            results["groups"].append({**shape, **json.loads(part.read_text())})
    results["seconds"] = round(time.monotonic() - began)
    return results
