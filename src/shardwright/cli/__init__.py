"""The commands. Exit status: 0 done, 1 failed, 2 bad input, 3 does not fit; 2 and 3 come with one line on stderr."""

from shardwright.cli import describing, planning, rehearsing, training  # noqa: F401  (each adds its commands)
from shardwright.cli.common import app, main

__all__ = ["app", "main"]
