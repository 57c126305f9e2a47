"""What a model of many equal blocks holds, saves and sends, composed from a rehearsal of one with few.

A model is runs of equal blocks between what comes before, between and after them. Where a run is rehearsed with few
blocks, one unit of its middle (a block, or as many as a pattern of unlike ones has) stands for those that are left out.
In the pass forward each of them adds what the unit's pieces add, before everything that follows; in the pass backward
likewise, in descending order; parameters and moments of all blocks are alive all the time. So every number of the long
step is the short one's plus the number of copies times a difference that the short trace shows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from shardwright.families.family import Family
from shardwright.families.table import family_of
from shardwright.pricing.cut import TracePiece, cut
from shardwright.simulate.rank_classes import rank_classes
from shardwright.spec.plan import Plan
from shardwright.stretching.bucket_period import short_runs
from shardwright.stretching.runs import Run, kinds, rehearse_few
from shardwright.trace import PHASES, Trace


@dataclass(frozen=True)
class Unit:
    """Blocks of the short model that stand for ``copies`` more of the like.

    standing: bytes of theirs that are alive from the start of a step (parameters), moments: those that the first step
    adds (AdamW's two moments and a count for each parameter).
    """

    blocks: range
    copies: int
    standing: int
    moments: int

    @classmethod
    def of(cls, trace: Trace, prefix: str, blocks: range, copies: int) -> Unit:
        """The unit of these ``blocks`` of a trace; prefix: qualified name of the list of blocks."""
        names = tuple(f"{prefix}.{block}." for block in blocks)
        parameters = [
            storage.bytes
            for storage in trace.storages
            if storage.category == "parameter" and not storage.op and storage.module.startswith(names)
        ]
        return cls(blocks, copies, sum(parameters), sum(2 * size + COUNT for size in parameters))

    def passing(self, pieces: Sequence[TracePiece], step: int, phase: str, micro: int) -> list[TracePiece]:
        """The unit's pieces in one pass, in order."""
        return [
            piece
            for piece in pieces
            if piece.block in self.blocks and (piece.step, piece.phase, piece.micro) == (step, phase, micro)
        ]

    def lasting(self, pieces: Sequence[TracePiece]) -> int:
        """What the first step of the unit leaves for good (weights that stay gathered)."""
        return sum(piece.lasting for piece in pieces if piece.block in self.blocks and piece.step == 1)


COUNT = 4
"""Bytes in which AdamW counts the steps of one parameter."""


@dataclass(frozen=True)
class Composed:
    """Two steps of the long model on one rank, in bytes: the peak of each phase, what is saved, what step 1 sends."""

    phase_peaks: Mapping[str, int]
    saved: int
    sent: int

    @property
    def peak(self) -> int:
        """The most alive at once."""
        return max(self.phase_peaks.values())

    def expected(self) -> dict[str, int]:
        """As a certificate compares it."""
        return {"peak": self.peak, "saved": self.saved, "volume": self.sent}


def compose(pieces: Sequence[TracePiece], saved: Sequence[int], units: Sequence[Unit]) -> Composed:
    """The long model, from the pieces of a short one's two steps and what it saved at each start of a pass backward."""
    peaks = dict.fromkeys(PHASES, 0)
    moments = sum(unit.copies * unit.moments for unit in units)
    shift, step = sum(unit.copies * unit.standing for unit in units), 1
    for index, piece in enumerate(pieces):
        if piece.step != step:
            step = piece.step
            shift = moments + sum(unit.copies * (unit.standing + unit.lasting(pieces)) for unit in units)
        new = moments if piece.phase == "step" and step == 1 else 0
        peaks[piece.phase] = max(peaks[piece.phase], piece.most + shift + new)
        for unit in units:
            if unit.copies and _ends(unit, pieces, index):
                passing = unit.passing(pieces, piece.step, piece.phase, piece.micro)
                added = passing[-1].end - passing[0].start
                highest = max(each.most for each in passing) + shift
                peaks[piece.phase] = max(peaks[piece.phase], highest + added, highest + unit.copies * added)
                shift += unit.copies * added
    return Composed(
        {phase: peak for phase, peak in peaks.items() if peak},
        max((held + _more_saved(pieces, units, number) for number, held in enumerate(saved)), default=0),
        _sent(pieces) + sum(unit.copies * _sent([p for p in pieces if p.block in unit.blocks]) for unit in units),
    )


def _ends(unit: Unit, pieces: Sequence[TracePiece], index: int) -> bool:
    """Whether a pass of the unit ends with this piece."""
    piece = pieces[index]
    if piece.block not in unit.blocks or piece.phase not in ("forward", "backward"):
        return False
    return unit.passing(pieces, piece.step, piece.phase, piece.micro)[-1] is piece


def _sent(pieces: Sequence[TracePiece]) -> int:
    return sum(piece.sent for piece in pieces if piece.step == 1)


def _more_saved(pieces: Sequence[TracePiece], units: Sequence[Unit], backward: int) -> int:
    """Saved bytes of the blocks that the short trace lacks, at its ``backward``-th pass backward."""
    passes = sorted({(p.step, p.micro) for p in pieces if p.phase == "forward" and p.block is not None})
    step, micro = passes[backward]
    return sum(unit.copies * sum(p.saved for p in unit.passing(pieces, step, "forward", micro)) for unit in units)


@dataclass(frozen=True)
class Short:
    """What a rehearsal of a few blocks shows: its pieces, what each pass backward began with, its runs' units."""

    pieces: tuple[TracePiece, ...]
    saved: tuple[int, ...]
    units: tuple[Unit, ...]


Known = dict[Hashable, Short]
"""(rank, what its rehearsal depends on) → what was rehearsed, for all plans that differ only in how long runs are."""


def composed_of(config: Any, plan: Plan, pool: Executor | None = None, known: Known | None = None) -> Composed:
    """The prediction of a plan from rehearsals of a few of its blocks: on the fullest rank, the most of each figure.

    pool: processes that rehearse the classes of equal ranks side by side. known: what need not be rehearsed again; it
    grows.
    """
    return composing(config, plan, pool, known)()


def composing(
    config: Any, plan: Plan, pool: Executor | None = None, known: Known | None = None
) -> Callable[[], Composed]:
    """The same in two parts: what a pool has to rehearse is begun here, and waited for when the answer is called."""
    family, known = family_of(config), {} if known is None else known
    short = short_runs(family, config, plan, 0, max(1, plan.in_flight - 1), 1)
    few = _few(family, config, plan, short)
    keys = [(ranks.representative, few) for ranks in rank_classes(config, plan)]
    new = [(config, plan, rank, short) for rank, _ in keys if (rank, few) not in known]
    begun = (pool.map if pool is not None else map)(_rehearsed, new)

    def composed() -> Composed:
        for task, rehearsed in zip(new, begun, strict=True):
            known[task[2], few] = rehearsed
        copies = [run.copies for run in short]
        found = [compose(each.pieces, each.saved, _units(each, copies)) for each in (known[key] for key in keys)]
        phases: Mapping[str, None] = dict.fromkeys(phase for each in found for phase in each.phase_peaks)
        return Composed(
            {phase: max(each.phase_peaks.get(phase, 0) for each in found) for phase in phases},
            max(each.saved for each in found),
            max(each.sent for each in found),
        )

    return composed


def _few(family: Family, config: Any, plan: Plan, short: Sequence[Run]) -> Hashable:
    """What the rehearsal of these runs, and their units in it, depend on: blocks, sites around, all else stated."""
    every, sites = kinds(family, config, plan), family.sites(config, plan.micro_batch * plan.sequence)
    blocks = tuple(every[block] for run in short for block in run.blocks)
    places = tuple((run.kept, run.radius, run.period) for run in short)
    around = tuple(plan.layout_for(site) for site in (sites[0], sites[-1]))
    return blocks, places, around, plan.model_dump_json(exclude={"layouts", "recompute"})


def _rehearsed(task: tuple[Any, Plan, int, Sequence[Run]]) -> Short:
    """One rank's rehearsal, in a process of the pool."""
    config, plan, rank, short = task
    family = family_of(config)
    trace = rehearse_few(family, config, plan, rank, 2, short)
    units, first = [], 0
    for run in short:
        blocks = range(first + run.radius, first + run.radius + run.period)
        units.append(Unit.of(trace, family.blocks, blocks, 0))
        first += run.kept
    pieces = cut(trace, family.blocks, family.attention, family.block_norms[0])
    return Short(tuple(pieces), tuple(trace.saved), tuple(units))


def _units(short: Short, copies: Sequence[int]) -> list[Unit]:
    return [replace(unit, copies=count) for unit, count in zip(short.units, copies, strict=True)]
