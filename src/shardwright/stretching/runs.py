"""Runs of blocks that are alike, and a model that has only a few blocks of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.families.family import Family
from shardwright.files.patterns import effective
from shardwright.models.build import of_blocks
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec.plan import Plan
from shardwright.trace import Trace

LONGEST_PERIOD = 8
"""Blocks of the longest pattern of unlike blocks that is looked for."""


@dataclass(frozen=True)
class Run:
    """Blocks [start, start + length) of the whole model, of which each is like the one ``period`` before it.

    kept: how many of them are rehearsed. radius: how many of these come before the unit that is repeated.
    """

    start: int
    length: int
    period: int
    kept: int
    radius: int = 0

    @property
    def copies(self) -> int:
        """How often the unit is repeated."""
        return (self.length - self.kept) // self.period

    @property
    def blocks(self) -> list[int]:
        """The blocks that are rehearsed, by their numbers in the whole model."""
        head = min(self.radius + self.period, self.kept)
        left_out = self.length - self.kept
        return [self.start + i + (left_out if i >= head else 0) for i in range(self.kept)]


def kinds(family: Family, config: Any, plan: Plan) -> list[Hashable]:
    """What makes blocks alike, for each block: its sites' layouts, how it is stored, recomputation, and its type."""
    sites = family.sites(config, plan.micro_batch * plan.sequence)
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    found: list[Hashable] = []
    for index, kind in enumerate(types):
        block = f"{family.blocks}.{index}"
        mine = [site for site in sites if site.name.startswith(f"{block}.")]
        layouts = tuple((plan.layout_for(site), plan.sharding_for(site.name)) for site in mine)
        found.append((layouts, plan.sharding_for(block), plan.recompute_for(block), kind))
    return found


def runs(found: Sequence[Hashable]) -> list[Run]:
    """Cuts blocks of these kinds into runs, each as long as can be."""
    cut, start = list[Run](), 0
    while start < len(found):
        best = Run(start, 1, 1, 1)
        for period in range(1, LONGEST_PERIOD + 1):
            stop = start + period
            while stop < len(found) and found[stop] == found[stop - period]:
                stop += 1
            if stop - start >= 2 * period and stop - start > best.length:
                best = Run(start, stop - start, period, stop - start)
        cut.append(best)
        start += best.length
    return cut


def shortened(run: Run, radius: int, units: int = 2, more: int = 0) -> Run:
    """The run with ``units`` units in its middle and ``radius`` blocks (and what does not divide) around, if shorter.

    Two units can be compared. more: blocks that are kept at the end beside those.
    """
    kept = units * run.period + 2 * radius + more
    kept += (run.length - kept) % run.period
    return replace(run, kept=kept, radius=radius) if kept < run.length else run


def rehearse_few(
    family: Family, config: Any, plan: Plan, rank: int, steps: int | Sequence[int], short: Sequence[Run]
) -> Trace:
    """The rehearsal of the blocks only that these runs keep; steps as ``rehearse`` takes them."""
    blocks = [block for run in short for block in run.blocks]
    return rehearse(of_blocks(config, blocks), plan_of_blocks(family, config, plan, blocks), rank, steps)


def plan_of_blocks(family: Family, config: Any, plan: Plan, blocks: Sequence[int]) -> Plan:
    """The plan with a pattern for each of these blocks, now numbered from 0, and those that decide outside of them."""
    sites = family.sites(config, plan.micro_batch * plan.sequence)
    layouts, params, recompute = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for new, old in enumerate(blocks):
        block, name = f"{family.blocks}.{old}", f"{family.blocks}.{new}"
        mine = [site for site in sites if site.name.startswith(f"{block}.")]
        layouts |= {name + site.name.removeprefix(block): plan.layout_for(site) for site in mine}
        stored = plan.stored_for(block)
        params |= {name: stored} if stored is not None else {}
        recompute[name] = plan.recompute_for(block)
    outside = [site.name for site in sites if not site.name.startswith(f"{family.blocks}.")]
    units = [name for name in (family.embedding, family.positions, family.final_norm, family.head) if name]
    return plan.evolve(
        layouts=layouts | effective(plan.layouts, outside),
        params=params | effective(plan.params, units),
        recompute=recompute,
    )
