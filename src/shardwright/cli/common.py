"""What the commands share: the application, their options, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.errors import BAD_INPUT, DOES_NOT_FIT, DoesNotFit, InputError
from shardwright.files.replacing import check_directory
from shardwright.spec.sharding import LEVELS

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright.models.remarks import NotApplied

# Everything heavy (torch, transformers) is imported inside the commands, so that --help answers at once, and after
# their arguments are checked, so that a refusal does too.

STORED = ", ".join(LEVELS)
SIZE = "such as 72GiB (GiB = 2^30 bytes)"
app = typer.Typer(
    name="shardwright",
    help="Fits a model onto devices, shows what is alive at the peak, and trains with that layout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON.")]


def main() -> None:
    """The entry point of ``shardwright``."""
    app()


@contextmanager
def exit_status() -> Iterator[None]:
    """Turns bad input into one line and exit status 2, a model that does not fit into one line and 3."""
    try:
        yield
    except InputError as error:
        _fail(error, BAD_INPUT)
    except DoesNotFit as error:
        _fail(error, DOES_NOT_FIT)


def _fail(error: Exception, status: int) -> None:
    sys.stdout.flush()
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    raise typer.Exit(status)


def tell_remarks(console: Console, unapplied: Sequence[NotApplied], warnings: Sequence[str]) -> None:
    """Prints what could not be applied, beside the answer, and warnings on standard error; a line each."""
    for each in unapplied:
        console.print(str(each), highlight=False, markup=False, soft_wrap=True)
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr, flush=True)


def check_directories(**paths: Path | None) -> None:
    """Raises InputError unless what each option names can be written. paths: option without dashes → file."""
    for option, path in paths.items():
        if path is not None:
            check_directory(path, f"--{option}")
