"""Metrics of a run as TensorBoard scalars, under the same names as in the JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwright.train.extras import check_extra


class TensorBoardWriter:
    """Writes one event file into a directory; ``tensorboard --logdir`` of it, or of any above, shows the run.

    continues_at: the first step that this writer tells, where a run continues; what files before it told of that step
    and later ones is not shown. Raises InputError where the package tensorboard is not installed.
    """

    def __init__(self, directory: Path | str, continues_at: int | None = None) -> None:
        check_extra("tensorboard", ("metrics",))
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=continues_at)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar for each value at ``step`` (from 1)."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
