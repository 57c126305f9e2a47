"""Metrics of a run as JSON lines: one object a line, flushed as it is written."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

GIB = 2**30


class MetricsWriter:
    """Appends one JSON line a step to a file, which is complete up to the last step at any time."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(
        self, *, step: int, loss: float, tokens_per_second: float, seconds: float, peak_bytes: int | None = None
    ) -> None:
        """One line: step (from 1), mean loss, tokens over the whole mesh, seconds of the step, its peak where known."""
        line: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "tokens_per_second": round(tokens_per_second, 3),
            "seconds": round(seconds, 6),
        }
        if peak_bytes is not None:
            line["memory/peak(GiB)"] = peak_bytes / GIB
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics file, oldest first."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]
