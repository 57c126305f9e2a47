"""Stretched rehearsals: a model of many equal blocks is rehearsed with few, and what its middle blocks do is repeated.

What comes out is the trace of the whole model, event by event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.families.family import Family
from shardwright.families.table import family_of, has_rule
from shardwright.models.config import load_config
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec.plan import Plan
from shardwright.stretching.bucket_period import short_runs
from shardwright.stretching.repeat import Repeat, repeated
from shardwright.stretching.runs import Run, rehearse_few
from shardwright.stretching.segments import NotPeriodic
from shardwright.trace import Trace, collector_at_rest

FURTHER = 2
"""Neighbours that are added on each side where the middle blocks do not do the same yet."""


def rehearse_stretched(config: Any, plan: Plan, rank: int = 0, steps: int = 2) -> Trace:
    """What ``rank`` would do under ``plan`` in its first ``steps`` steps: ``rehearse``, but faster for many blocks.

    config: a path of a config.json, or a Hugging Face config. A model is rehearsed as it is where its blocks are few or
    do not do the same, and where the bucket period is no number of whole blocks.
    """
    if isinstance(config, (str, Path)):
        config = load_config(config)
    with collector_at_rest():
        return _rehearse(config, plan, rank, steps)


def _rehearse(config: Any, plan: Plan, rank: int, steps: int) -> Trace:
    if not has_rule(config):
        return rehearse(config, plan, rank, steps)
    family = family_of(config)
    for radius in (plan.in_flight, plan.in_flight + FURTHER):
        short = short_runs(family, config, plan, rank, radius, 2)
        if all(run.copies == 0 for run in short):
            break
        try:
            return _stretched(family, config, plan, rank, steps, short)
        except NotPeriodic:
            continue
    return rehearse(config, plan, rank, steps)


def _stretched(family: Family, config: Any, plan: Plan, rank: int, steps: int, short: Sequence[Run]) -> Trace:
    trace = rehearse_few(family, config, plan, rank, steps, short)
    repeats, first = list[Repeat](), 0
    for run in short:
        repeats.append(Repeat(first + run.radius, run.period, run.copies))
        first += run.kept
    stretched = repeated(trace, family.blocks, repeats)
    stretched.arena = _slots(trace, family, config, plan, rank, steps, short)
    return stretched


def _slots(
    trace: Trace, family: Family, config: Any, plan: Plan, rank: int, steps: int, short: Sequence[Run]
) -> dict[str, list[int]]:
    """The arena's slots for the whole model: where W is kept, each copy of a unit adds what one more added."""
    slots = {dtype: Counter(sizes) for dtype, sizes in trace.arena.items()}
    for place, run in enumerate(short):
        if run.copies == 0 or not plan.sharding_for(f"{family.blocks}.{run.start}").keep:
            continue
        longer = [*short]
        longer[place] = replace(run, kept=run.kept + run.period)
        more = rehearse_few(family, config, plan, rank, steps, longer).arena
        for dtype, sizes in more.items():
            before = Counter(trace.arena.get(dtype, ()))
            if before - Counter(sizes):
                raise NotPeriodic(f"arena: one unit more takes slots away: {trace.arena} against {more}")
            for size, count in (Counter(sizes) - before).items():
                slots.setdefault(dtype, Counter())[size] += run.copies * count
    return {dtype: sorted(counts.elements(), reverse=True) for dtype, counts in slots.items()}
