"""How long something takes on all ranks at once: the slowest rank counts, and of several repetitions the median.

Every rank calls the same with the same counts, and every rank is told the same seconds, so that whatever is decided by
them is decided alike everywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

MOST_CALLS = 200
"""In a row, of one repetition."""


@dataclass(frozen=True)
class Stopwatch:
    """Times work of this process on ``device``, ``repetitions`` times each.

    least: a repetition is so many calls in a row that it lasts about so many seconds. Where ranks share a processor,
    each gets it for some milliseconds, and what is shorter would not see the others.
    """

    device: torch.device
    repetitions: int
    least: float = 0.02

    def seconds(self, work: Callable[[], object]) -> float:
        """One call of ``work``, which all ranks do at the same time."""
        work()
        (alone,) = self._slowest([self._once(work, 1)])
        count = max(1, min(MOST_CALLS, math.ceil(self.least / alone)))
        return statistics.median(self._slowest([self._once(work, count) for _ in range(self.repetitions)]))

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Of each repetition the slowest rank's."""
        worst = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return [float(value) for value in worst.tolist()]

    def _once(self, work: Callable[[], object], count: int) -> float:
        """Until this rank is done, for each of ``count`` calls; a barrier at the end would count among them."""
        dist.barrier()
        if self.device.type == "cuda":
            return self._once_on_device(work, count)
        began = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - began) / count

    def _once_on_device(self, work: Callable[[], object], count: int) -> float:
        torch.cuda.synchronize(self.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            work()
        ended.record()
        torch.cuda.synchronize(self.device)
        return float(began.elapsed_time(ended)) * 1e-3 / count
