"""What the demo is asked for, checked before anything slow is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import InputError
from shardwright.files.replacing import check_directory
from shardwright.spec.sharding import one_level
from shardwright.train.loop import RECORDED_STEPS

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Wanted:
    """What the demo is asked for.

    ranks: processes of this machine. memory: limit in bytes for the peak of every rank; None: the machine's share.
    steps: optimizer steps. level: how parameters are stored, None for any way. dtype: element type of products;
    parameters are float32.

    Raises InputError for bad input.
    """

    ranks: int
    memory: int | None
    steps: int
    seed: int
    level: str | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"--ranks: found {self.ranks}; allowed: at least 1")
        if self.steps < RECORDED_STEPS:
            allowed = f"at least {RECORDED_STEPS}, the steps that are recorded"
            raise InputError(f"--steps: found {self.steps}; allowed: {allowed}")
        if self.level is not None:
            object.__setattr__(self, "level", one_level(self.level, "--level"))
        if self.seed < 0:
            raise InputError(f"--seed: found {self.seed}; allowed: at least 0")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype: found {self.dtype!r}; allowed: {', '.join(DTYPES)}")


def check_places(json_path: Path | None, out_dir: Path | None) -> None:
    """Raises InputError where the figures cannot be written, or the directory to keep is neither new nor empty."""
    if json_path is not None:
        check_directory(json_path, "--json")
    if out_dir is not None and out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise InputError(f"--output: found {out_dir}, which is not empty; allowed: a directory, new or empty")
