"""The console that tables go to."""

from __future__ import annotations

import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from shardwright.files.replacing import write_text

_SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's picture of a terminal, without its fonts from the network."""

WIDTH = 120
"""Columns that tables take where the output is no terminal."""


def table_console(record: bool = False) -> Console:
    """Standard output: as wide as the terminal, `WIDTH` columns elsewhere. record: for `save_picture`."""
    console = Console(record=record)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def save_picture(console: Console, path: Path, title: str) -> None:
    """What a recording console has shown so far, as an SVG picture."""
    write_text(path, console.export_svg(title=title, code_format=_SVG, unique_id="shardwright"))
