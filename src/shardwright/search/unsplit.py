"""The best data-parallel plan of a model without a rule table, whose linears run unsplit.

There are few options: how parameters are stored, whether blocks are recomputed, and into how many micro-batches a
step is cut. Each is rehearsed in full on every class of ranks until one of its kind fits; the fastest is the plan. What
is not searched has no bound: another grid would need a rule table.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.certificate.certify import Certificate, certifying
from shardwright.errors import DoesNotFit, InputError
from shardwright.files.sizes import format_bytes
from shardwright.models.config import load_config
from shardwright.models.positions import check_positions
from shardwright.search.explore import Tell, rehearsing
from shardwright.simulate.machine import Machine
from shardwright.space.request import Asked
from shardwright.spec.plan import Plan
from shardwright.spec.sharding import LEVELS

KEPT = "parameters, kept"
"""The level at which W stays gathered from a forward to its backward."""


@dataclass(frozen=True)
class UnsplitOption:
    """One option. level: a sharding level, or `KEPT`. recomputed: whether backward computes blocks again."""

    plan: Plan
    level: str
    recomputed: bool

    @property
    def name(self) -> str:
        """For tables."""
        pieces = self.plan.accumulation
        recomputed = ", blocks recomputed" if self.recomputed else ""
        return f"{self.level}{recomputed}, {pieces} micro-batch{'es' if pieces > 1 else ''}"


@dataclass(frozen=True)
class Rehearsed:
    """An option, and what its rehearsals say: seconds of step 2, peak of the fullest rank in bytes."""

    option: UnsplitOption
    certificate: Certificate

    @property
    def seconds(self) -> float:
        assert self.certificate.seconds is not None
        return self.certificate.seconds

    @property
    def peak(self) -> int:
        return self.certificate.peak_bytes


@dataclass(frozen=True)
class FoundUnsplit:
    """The answer: a certified plan, its option, and all that were rehearsed, fastest first."""

    asked: Asked
    plan: Plan
    best: Rehearsed
    looked_at: tuple[Rehearsed, ...]


def search_unsplit(ask: Asked, workers: int | None = None, tell: Tell = lambda line: None) -> FoundUnsplit:
    """The fastest data-parallel plan that fits. workers: processes that rehearse (default: the machine's processors).

    Raises InputError where the batch does not divide, or the model cannot run so; DoesNotFit where nothing fits, naming
    the least that does.
    """
    started, devices = time.monotonic(), ask.cluster.devices
    config = load_config(ask.base.config_path)
    check_positions(config, ask.base.sequence)
    if ask.base.micro_batch % devices:
        raise InputError(
            f"global_batch: found {ask.base.micro_batch} sequences on {devices} devices; allowed: a multiple of "
            f"{devices}, since a model without a rule table does not split sequences"
        )
    tasks = [(config, ask, level, recomputed) for level in _levels(ask) for recomputed in (False, True)]
    looked_at: list[Rehearsed] = []
    with warnings.catch_warnings(), rehearsing(workers) as pool:
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        for (_, _, level, _), found in zip(tasks, pool.map(_of_kind, tasks), strict=True):
            tell(f"{level}: rehearsed")
            looked_at += found
    looked_at.sort(key=lambda each: (each.seconds, each.peak))
    fitting = [each for each in looked_at if each.peak <= ask.memory]
    if not fitting:
        least = min(looked_at, key=lambda each: each.peak)
        raise DoesNotFit(
            f"memory: found {format_bytes(ask.memory)} ({ask.memory:,} bytes) a device; allowed: "
            f"{format_bytes(least.peak)} ({least.peak:,} bytes) at least, with {least.option.name}"
        )
    best = fitting[0]
    predicted = best.certificate.predicted() | {"time": best.seconds}
    plan = best.certificate.written(best.option.plan).evolve(
        predicted=predicted, objective=best.seconds, solve_time=time.monotonic() - started
    )
    return FoundUnsplit(ask, plan, best, tuple(looked_at))


def _levels(ask: Asked) -> tuple[str, ...]:
    if ask.cluster.devices == 1:
        return ("replicate",)
    return tuple(level for level in (*LEVELS, KEPT) if ask.level in (None, level.partition(",")[0]))


def _of_kind(task: tuple[Any, Asked, str, bool]) -> list[Rehearsed]:
    """In a process of the pool: one kind in more and more micro-batches, until it fits."""
    config, ask, level, recomputed = task
    found: list[Rehearsed] = []
    for option in _options(ask, level, recomputed):
        plan = option.plan
        machine = Machine(ask.cluster, plan.mesh, plan.dtype, plan.backend, plan.stored_dtype)
        try:
            found.append(Rehearsed(option, certifying(config, plan, machine=machine)({})))
        except InputError:
            if recomputed:  # no block of this model can be
                return []
            raise
        if found[-1].peak <= ask.memory:
            break
    return found


def _options(ask: Asked, level: str, recomputed: bool) -> Iterator[UnsplitOption]:
    base, devices, pieces = ask.base, ask.cluster.devices, 1
    stored = {"level": "parameters", "keep": True} if level == KEPT else level
    while base.micro_batch % (pieces * devices) == 0:
        plan = base.evolve(
            mesh={"data": devices},
            micro_batch=base.micro_batch // pieces,
            accumulation=pieces,
            params={"*": stored},
            recompute={"*": "block"} if recomputed else {},
        )
        yield UnsplitOption(plan, level, recomputed)
        pieces *= 2
