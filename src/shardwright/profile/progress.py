"""What a profile shows while it measures: a progress bar on a terminal, a plain line for each part elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class MeasuringProgress:
    """Shows what is measured; a context manager. A silent one shows nothing (every rank but the first)."""

    def __init__(self, total: int, silent: bool = False, console: Console | None = None) -> None:
        self._total, self._silent, self._part = total, silent, ""
        self._console = console or Console()
        self._bar: Progress | None = None

    def __enter__(self) -> MeasuringProgress:
        if self._console.is_terminal and not self._silent:
            self._bar = Progress(
                TextColumn("measuring"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[part]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("measuring", total=self._total, part="")
            self._bar.start()
        return self

    def show(self, part: str) -> None:
        """The next measurement begins; it belongs to ``part``."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, part=part)
        elif part != self._part and not self._silent:
            print(f"measuring {part}", file=self._console.file, flush=True)
        self._part = part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
