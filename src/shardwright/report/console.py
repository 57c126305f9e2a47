"""The console that tables go to."""

from __future__ import annotations

from rich.console import Console

WIDTH = 120
"""Columns that tables take where the output is no terminal."""


def table_console() -> Console:
    """Standard output: as wide as the terminal, `WIDTH` columns elsewhere."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    return console
