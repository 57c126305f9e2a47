"""The commands that describe: bounds of a model's products, and schemas of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.common import app, exit_status
from shardwright.errors import InputError
from shardwright.files.config_file import config_file, read_config
from shardwright.files.replacing import check_directory, write_text


@app.command()
def bounds(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A model's config.")],
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Numbers of ranks.")] = "8,64,512",
    tokens: Annotated[str, typer.Option(metavar="N,N", help="Tokens of a batch.")] = "8192,65536,1048576",
) -> None:
    """Tell what the products of a model move on their best grids, and the least that they could."""
    with exit_status():
        counts, sizes = _numbers(ranks, "--ranks"), _numbers(tokens, "--tokens")
        read_config(config_file(config))

        from shardwright.families.table import family_of
        from shardwright.models.config import load_config
        from shardwright.report.bounds import bounds_table
        from shardwright.report.console import table_console

        loaded = load_config(config)
        sites = family_of(loaded).sites(loaded, 1)
        table_console().print(bounds_table(sites, counts, sizes))


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"{option}: found {text!r}; allowed: whole numbers of at least 1, such as 8,64,512")
    return [int(part) for part in parts]


@app.command()
def schema(
    kind: Annotated[str | None, typer.Argument(metavar="plan|cluster|run", help="The kind of file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write into FILE.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="All kinds, as a page to read.")] = False,
) -> None:
    """Print the JSON schema of a file that users write, for editors to check and complete against."""
    with exit_status():
        from shardwright.report import schema as schemas

        if markdown and kind is not None:
            raise InputError(f"--markdown: found {kind} beside it; allowed: alone, the page tells of every kind")
        if not markdown and kind not in schemas.FILES:
            raise InputError(f"schema: found {kind or 'nothing'}; allowed: {', '.join(schemas.FILES)}")
        if kind is None:
            text = schemas.markdown()
        else:
            text = json.dumps(schemas.json_schema(kind), indent=2, ensure_ascii=False) + "\n"
        if output is None:
            print(text, end="")
        else:
            check_directory(output, "--output")
            write_text(output, text)
