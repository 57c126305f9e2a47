"""Starts a command of shardwright as ranks on this machine through torch's own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def command(words: Sequence[str], ranks: int) -> list[str]:
    """The command line of ``shardwright`` with these words (``["train", "run.yaml"]``) on ``ranks`` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "shardwright", *words]


def launch(words: Sequence[str], ranks: int) -> int:
    """Runs ``shardwright`` with these words as `command` does, with one intra-op thread a rank, on this terminal.

    Returns the exit status: 2 or 3 where a rank ended so, which torch's launcher alone would make 1 of.
    """
    launcher = [sys.executable, "-m", "shardwright.train.launcher", str(ranks), *words]
    return subprocess.run(launcher, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
