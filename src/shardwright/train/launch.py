"""Starts the ranks of a training run on this machine through torch's own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def command(run_path: Path | str, ranks: int) -> list[str]:
    """The command line that trains ``run_path`` on ``ranks`` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "shardwright", "train", str(run_path)]


def launch(run_path: Path | str, ranks: int) -> int:
    """Runs `command` with one intra-op thread a rank, on this terminal; returns its exit status."""
    return subprocess.run(command(run_path, ranks), env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
