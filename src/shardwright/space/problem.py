"""What the search is asked, and the plan that a structure and its blocks' choices make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.families.family import Family
from shardwright.families.table import family_of
from shardwright.simulate.machine import Machine
from shardwright.space.patterns import patterns
from shardwright.space.space import Mode, Structure, structures
from shardwright.spec.cluster import Cluster
from shardwright.spec.layout import GridLayout
from shardwright.spec.plan import Plan
from shardwright.spec.site import Site
from shardwright.stretching.bucket_period import cap_of

Choice = tuple[Mode, Mode, str]
"""(mode of attention, mode of MLP, recomputation) of a block."""


@dataclass(frozen=True)
class Problem:
    """What the search is asked: a model, the devices, and the sizes that are given.

    base: a plan on one device, with the sizes of a step. memory: bytes that a device may hold. level: the only sharding
    level that is looked at, None for all. whole: only steps of one micro-batch are looked at.
    """

    config: Any
    base: Plan
    cluster: Cluster
    devices: int
    memory: int
    level: str | None = None
    whole: bool = False

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over the whole mesh."""
        return self.base.micro_batch

    @property
    def family(self) -> Family:
        """The model's rule table."""
        return family_of(self.config)

    def sites(self, accumulation: int = 1) -> tuple[Site, ...]:
        """The sites of one micro-batch."""
        return self.family.sites(self.config, self.global_batch // accumulation * self.base.sequence)

    def structures(self) -> Iterator[Structure]:
        """Everything that may be chosen."""
        every = structures(self.family, self.config, self.devices, self.global_batch, self.base.sequence)
        asked = (each for each in every if self.level in (None, each.level))
        return (each for each in asked if each.accumulation == 1 or not self.whole)

    def machine(self, structure: Structure) -> Machine:
        """The devices as a mesh of this structure."""
        stored = self.base.master_dtype or self.base.dtype
        return Machine(self.cluster, structure.mesh, self.base.dtype, self.base.backend, stored)

    def plan(self, structure: Structure, choices: Sequence[Choice]) -> Plan:
        """The plan of a structure and its blocks' choices. Raises InputError where its bins are not full again after
        whole blocks.
        """
        plan = plan_of(structure, self.base, self.family, self.sites(structure.accumulation), choices)
        return plan.evolve(bucket=cap_of(self.config, plan, structure.bins)) if structure.bins else plan


def plan_of(
    structure: Structure,
    base: Plan,
    family: Family,
    sites: Sequence[Site],
    choices: Sequence[Choice],
) -> Plan:
    """The plan of a structure whose blocks choose so, block by block.

    base: a plan of the same model, for every field that is not searched. The embedding and the head take the mode of
    the block beside them.
    """
    layouts: dict[str, GridLayout] = {}
    by_suffix: dict[str, list[GridLayout]] = {}
    for site in sites:
        number = _block(site.name, family.blocks)
        attention, mlp, _ = choices[number] if number is not None else choices[0 if site is sites[0] else -1]
        inside = family.in_attention(site)
        layout = structure.layout(site, attention if inside else mlp, inside)
        if number is None:
            layouts[site.name] = layout
        else:
            by_suffix.setdefault(site.name.removeprefix(f"{family.blocks}.{number}"), []).append(layout)
    for suffix, each in by_suffix.items():
        layouts |= patterns(family.blocks, suffix, each)
    recompute = [word for _, _, word in choices]
    return base.evolve(
        mesh=structure.mesh,
        micro_batch=base.micro_batch // structure.accumulation,
        accumulation=structure.accumulation,
        layouts=layouts,
        params={"*": structure.params},
        in_flight=structure.in_flight,
        recompute=_recomputed(family.blocks, recompute),
    )


def _recomputed(blocks: str, words: Sequence[str]) -> dict[str, str]:
    """Patterns of what is recomputed; nothing needs to be said of the rest where that is the usual choice."""
    found = patterns(blocks, "", words)
    if found[f"{blocks}.*"] == "none":
        del found[f"{blocks}.*"]
    return found


def _block(name: str, blocks: str) -> int | None:
    if not name.startswith(f"{blocks}."):
        return None
    return int(name.removeprefix(f"{blocks}.").split(".")[0])
