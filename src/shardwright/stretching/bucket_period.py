"""The pace of a bucket: after how many blocks its bins are as full as they were.

Equal blocks bring equal small gradients in equal order. A bin that is as large as all those of so many blocks is full
again after as many, wherever it began: so what these blocks do repeats. What a bin brought goes on together. It is in a
steady state once one bin filled, it travelled while the next one filled, and what it brought travelled on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from shardwright.errors import InputError
from shardwright.families.family import Family
from shardwright.families.table import family_of
from shardwright.models.build import build_meta, of_blocks
from shardwright.models.parallelize import put
from shardwright.runtime.bins import Bins
from shardwright.runtime.bucket import Load
from shardwright.simulate.fake import ShortFakeMode
from shardwright.simulate.rehearsal import stage
from shardwright.spec.plan import Plan
from shardwright.stretching.runs import Run, kinds, plan_of_blocks, runs, shortened
from shardwright.stretching.segments import Names
from shardwright.values.initial import Unfilled

SETTLING = 3
"""Bins that come before the steady state: while the first one fills, travels, and goes on."""

UNBOUNDED = 2**50
"""A cap below which every gradient is small, in bytes."""


def bucketed(plan: Plan) -> bool:
    """Whether any gradients share a bucket."""
    return bool(plan.bucket or any(stored.bucket for stored in plan.params.values()))


def short_runs(family: Family, config: Any, plan: Plan, rank: int, radius: int, units: int) -> list[Run]:
    """The model's runs with ``units`` units each (at least ``radius`` blocks around), so that each unit does the same.

    Where gradients share a bucket a unit is as many blocks as it takes until its bins are full at the same place again
    (the bucket period); runs are as they are where the period is no number of whole blocks. Two units say the same
    where that which they release was made in the steady state, too: with several micro-batches a block releases
    gradients of blocks before it.
    """
    found = runs(kinds(family, config, plan))
    if not bucketed(plan):
        return [shortened(run, radius, units) for run in found]
    short, bins = list[Run](), SETTLING * (2 if units > 1 and plan.accumulation > 1 else 1)
    for run in found:
        period = bucket_period(family, config, plan, rank, range(run.start, run.start + run.period))
        if period is None:
            return found
        around = max(radius, period)
        short.append(shortened(replace(run, period=period), around, units, max(0, bins * period - around)))
    return short


def bucket_period(family: Family, config: Any, plan: Plan, rank: int, unit: Sequence[int]) -> int | None:
    """After how many blocks, in whole units, the bins are as full as before; None where that is not so.

    unit: numbers of the blocks of one. Its blocks need not be alike, but for what they fill.
    """
    by_block = _loads(family, config, plan, rank, unit)
    alike = all(loads == by_block[0] for loads in by_block)
    each, room = dict[Bins, int](), dict[Bins, int]()
    for _, load in by_block[0] if alike else chain.from_iterable(by_block):
        each[load.bins] = each.get(load.bins, 0) + load.bytes
        if room.setdefault(load.bins, load.room) != load.room:
            return None
    if any(room[bins] % size for bins, size in each.items()):
        return None
    rounds = math.lcm(*(room[bins] // size for bins, size in each.items()))
    return math.lcm(rounds, len(unit)) if alike else rounds * len(unit)


def cap_of(config: Any, plan: Plan, blocks: int) -> int:
    """The cap, in bytes, with which a bin is full after ``blocks`` blocks: of their vectors, norms and biases.

    Raises InputError where there are none, or they fill bins of different periods.
    """
    family, each = family_of(config), dict[Bins, int]()
    for shape, load in _loads(family, config, plan.evolve(bucket=UNBOUNDED), 0, [0])[0]:
        if len(shape) == 1:
            each[load.bins] = each.get(load.bins, 0) + load.bytes
    cap = 2 * blocks * max(each.values(), default=0)
    around = bucket_period(family, config, plan.evolve(bucket=cap), 0, [0])
    if not cap or around != blocks:
        raise InputError(
            f"bucket: found bins that come round after {around} blocks; allowed: norms and biases that fill them with "
            f"{blocks}"
        )
    return cap


def _loads(
    family: Family, config: Any, plan: Plan, rank: int, blocks: Sequence[int]
) -> list[list[tuple[torch.Size, Load]]]:
    """Of each block: (shape that products read, what its gradient fills) of each parameter that shares a bucket."""
    few, of_few = of_blocks(config, blocks), plan_of_blocks(family, config, plan, blocks)
    found: list[list[tuple[torch.Size, Load]]] = [[] for _ in blocks]
    with stage(plan, rank) as mesh:
        model = build_meta(few, plan.stored_dtype)
        with ShortFakeMode():
            schedule = put(model, mesh, of_few, source=Unfilled(torch.device("cpu"))).parameter_store.schedule
            for unit in schedule.param_groups:
                block = Names(family.blocks).block(unit.name)
                if block is not None:
                    shapes_and_loads = [
                        (each.whole_shape, schedule.reductions.load(each)) for each in unit.members if each.trains
                    ]
                    found[block] += [(shape, load) for shape, load in shapes_and_loads if load is not None]
    return found
