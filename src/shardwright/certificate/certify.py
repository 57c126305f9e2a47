"""The certificate of a plan: it is rehearsed on each class of equal ranks, and what was predicted must come out.

Collectives must agree across ranks too (agreement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shardwright.certificate.agreement import ByAxes, agree_by_class, by_axes
from shardwright.models.config import load_config
from shardwright.simulate.machine import Machine
from shardwright.simulate.rank_classes import RankClass, rank_classes
from shardwright.simulate.timeline import timeline
from shardwright.spec.plan import Plan
from shardwright.stretching.stretch import rehearse_stretched


class Uncertified(RuntimeError):
    """A rehearsal says something else than the prediction; the message names the figure."""


@dataclass(frozen=True)
class Figures:
    """What one class of equal ranks needs (bytes): peak by phase, held by the autograd graph, sent in step 1."""

    ranks: RankClass
    peak: Mapping[str, int]
    saved: int
    volume: int

    def to_json(self) -> dict[str, Any]:
        """Plain data for a plan file."""
        return {"ranks": len(self.ranks.ranks), "peak": dict(self.peak), "saved": self.saved, "volume": self.volume}


@dataclass(frozen=True)
class Certificate:
    """What the rehearsals of a plan say: figures of every class of ranks, and the arena's slots that serve them all.

    seconds: of step 2 on the fullest rank, where the machine is known.
    """

    classes: tuple[Figures, ...]
    arena: Mapping[str, list[int]]
    seconds: float | None = None

    @property
    def peak(self) -> dict[str, int]:
        """Phase → the most alive in it, on the fullest rank."""
        return largest(figures.peak for figures in self.classes)

    @property
    def peak_bytes(self) -> int:
        """The most alive at once, on the fullest rank."""
        return max(self.peak.values())

    @property
    def saved(self) -> int:
        """The most that the autograd graph of a rank holds."""
        return max(figures.saved for figures in self.classes)

    @property
    def volume(self) -> int:
        """The most that a rank sends in step 1."""
        return max(figures.volume for figures in self.classes)

    def predicted(self) -> dict[str, Any]:
        """The plan's field of that name."""
        told = {f"rank {figures.ranks.representative}": figures.to_json() for figures in self.classes}
        return {"peak": self.peak, "saved": self.saved, "volume": self.volume, "rank_classes": told}

    def written(self, plan: Plan) -> Plan:
        """The plan with what is certain of it: ``predicted`` and ``arena``."""
        return plan.evolve(predicted=self.predicted(), arena=dict(self.arena))


Expected = Mapping[str, int]
"""``peak``, ``saved`` and ``volume`` (bytes, of the fullest rank), or some of them, as they were predicted."""


def certify(config: Any, plan: Plan, expected: Expected | None = None) -> Certificate:
    """Rehearses two steps of ``plan`` on one rank of each class.

    config: a path of a config.json, or a Hugging Face config. Raises Uncertified where the rehearsals say something
    else than was expected, DivergenceError where collectives do not agree.
    """
    return certifying(config, plan)(expected or {})


def certifying(
    config: Any, plan: Plan, pool: Executor | None = None, machine: Machine | None = None
) -> Callable[[Expected], Certificate]:
    """The same in two parts: what a pool has to rehearse is begun here, and compared when the answer is called.

    pool: processes that rehearse the classes side by side. machine: tells seconds.
    """
    if isinstance(config, (str, Path)):
        config = load_config(config)
    classes = rank_classes(config, plan)
    plan = plan.evolve(arena=None)  # the rehearsals tell what it must be
    tasks = [(config, plan, each, len(classes) > 1, machine) for each in classes]
    begun = (pool.map if pool is not None else map)(_evidence, tasks)

    def certified(expected: Expected) -> Certificate:
        found = {evidence.figures.ranks.representative: evidence for evidence in begun}
        agree_by_class({rank: evidence.collectives for rank, evidence in found.items()}, classes, plan.mesh)
        fullest = max(found.values(), key=lambda evidence: max(evidence.figures.peak.values()))
        figures = tuple(evidence.figures for evidence in found.values())
        certificate = Certificate(figures, slots(evidence.arena for evidence in found.values()), fullest.seconds)
        _compare(certificate, expected)
        return certificate

    return certified


@dataclass(frozen=True)
class Evidence:
    """What the rehearsal of one rank says of its class: a trace is long, and this is all that a certificate needs.

    collectives: by the axes that they go over. seconds: of step 2.
    """

    figures: Figures
    arena: Mapping[str, list[int]]
    collectives: ByAxes
    seconds: float | None


def _evidence(task: tuple[Any, Plan, RankClass, bool, Machine | None]) -> Evidence:
    """One class's rehearsal, in a process of the pool. Where there is one class only, it agrees with itself."""
    config, plan, ranks, others, machine = task
    trace = rehearse_stretched(config, plan, ranks.representative)
    figures = Figures(ranks, trace.phase_peaks, trace.saved_bytes, trace.sent_bytes)
    seconds = timeline(trace, machine, 2).seconds if machine is not None else None
    return Evidence(figures, trace.arena, by_axes(trace, plan.mesh) if others else {}, seconds)


def _compare(certificate: Certificate, expected: Expected) -> None:
    found = {"peak": certificate.peak_bytes, "saved": certificate.saved, "volume": certificate.volume}
    for name, bytes_expected in expected.items():
        if found[name] != bytes_expected:
            raise Uncertified(f"{name}: {bytes_expected:,} bytes were predicted, {found[name]:,} rehearsed")


def largest(peaks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Phase → the largest of its peaks."""
    found: dict[str, int] = {}
    for each in peaks:
        for phase, peak in each.items():
            found[phase] = max(peak, found.get(phase, 0))
    return found


def slots(arenas: Iterable[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """Slots (element type → bytes, largest first) that serve every rank's leases."""
    found: dict[str, list[int]] = {}
    for arena in arenas:
        for dtype, sizes in arena.items():
            merged = zip_longest(found.get(dtype, []), sizes, fillvalue=0)
            found[dtype] = [max(pair) for pair in merged]
    return found
