"""Metrics of a run: their names, what writes them, and the writer of JSON lines (one object a line, flushed)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from shardwright.files.replacing import write_text

GIB = 2**30


class Writer(Protocol):
    """What every writer of metrics can do; a context manager that closes it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes name → value for step ``step`` (from 1), to be read at once."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def step_metrics(
    *,
    loss: float,
    tokens_per_second: float,
    seconds: float,
    peak_bytes: int | None = None,
    evaluation_loss: float | None = None,
) -> dict[str, float]:
    """The metrics of one step by the names that every writer uses; those that are None are left out.

    loss: mean over the targets of the step. tokens_per_second: over the whole mesh. seconds: of the step.
    peak_bytes: most bytes alive in it, written in GiB (2^30 bytes). evaluation_loss: mean over held-out targets.
    """
    values = {"loss": loss, "tokens_per_second": round(tokens_per_second, 3), "seconds": round(seconds, 6)}
    if peak_bytes is not None:
        values["memory/peak(GiB)"] = peak_bytes / GIB
    if evaluation_loss is not None:
        values["evaluation/loss"] = evaluation_loss
    return values


class MetricsWriter:
    """Appends one JSON line a step to a file, which is complete up to the last step at any time."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line: the step (from 1), then the values."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def forget_metrics_after(path: Path | str, step: int) -> None:
    """Drops the lines of later steps, and a last line that is not whole: the run that wrote them continues at ``step``.

    Nothing is done where there is no file.
    """
    path = Path(path)
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # written by half when the run was killed
    write_text(path, "".join(kept))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics file, oldest first."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]
