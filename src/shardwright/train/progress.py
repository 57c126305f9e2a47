"""What a run shows while it trains: a progress bar on a terminal, a plain line every so often elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10
"""Plain lines that a run prints, about, where there is no terminal."""


class StepProgress:
    """Shows steps, loss and tokens per second; a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console()
        self._bar: Progress | None = None

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=self._steps, figures="")
            self._bar.start()
        return self

    def show(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Step ``step`` (from 1) is done: mean loss over the mesh, tokens per second over the mesh."""
        figures = f"loss {loss:.4f} · {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        elif step == 1 or step == self._steps or step % max(1, self._steps // LINES) == 0:
            print(f"step {step}/{self._steps} · {figures}", file=self._console.file, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
