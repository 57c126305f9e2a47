"""What no plan of a structure can beat: seconds and bytes, by formulas alone. They order the search and end it.

A step takes at least as long as its products, and at least as long as any one axis is busy, with the gathered inputs
kept and nothing recomputed. It holds at least its parameters and moments, and the inputs of its blocks. Where a short
rehearsal has told what a block saves and takes (``rehearsed_bounds``), blocks whose saved bytes have no room are
recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.families.family import Family
from shardwright.formulas.place import Here
from shardwright.formulas.volume import site_volume
from shardwright.pricing.rehearsed_bounds import RehearsedBound
from shardwright.simulate.machine import Machine
from shardwright.space.space import Mode, Structure
from shardwright.spec.dtypes import FLOATS
from shardwright.spec.layout import GridLayout
from shardwright.spec.site import Site

KEEP = Mode("blocking", "gathered")


@dataclass(frozen=True)
class FormulaBound:
    """Of one structure: ``seconds`` and ``memory`` (bytes) that its best plan needs at least; the rest are guesses.

    inputs: of ``memory`` those bytes that are inputs of blocks. beyond: seconds that a likely plan takes on top of its
    operators: what communication the features' axes cost, and what the tokens' axes cost beyond the products.
    recomputed: a third of the products of blocks that must be recomputed to fit.
    """

    seconds: float
    memory: int
    inputs: int
    beyond: float
    recomputed: float

    @property
    def likely(self) -> float:
        """Seconds that a likely plan takes."""
        return self.seconds + self.beyond + self.recomputed

    def above(self, rehearsed_bound: RehearsedBound, accumulation: int, memory: int) -> FormulaBound:
        """The limits, now that a rehearsal told what units of blocks take and save.

        What is alive when backward begins: ``memory``, and what the blocks save beyond their inputs that are not
        recomputed. So at least so many are that the others' has room, and each of them runs its forward again.
        """
        units = rehearsed_bound.units
        more = rehearsed_bound.saved // accumulation - self.inputs // units
        lacking = self.memory + units * more - memory
        recomputed = min(units, -(-lacking // more)) if more > 0 and lacking > 0 else 0
        return replace(
            self,
            seconds=max(self.seconds, rehearsed_bound.seconds + recomputed * rehearsed_bound.again),
            recomputed=0.0,
        )


@dataclass(frozen=True)
class Split:
    """What splitting features alone decides, in seconds of one micro-batch: products, what their axes move, each
    axis's share of it. It is the same for all structures of one ``Structure.split`` and one order of the axes.
    """

    products: float
    features: float
    busy: Mapping[str, float]


def split_of(
    structure: Structure, family: Family, sites: Sequence[Site], blocks: int, machine: Machine, dtype: str
) -> Split:
    """sites: of one micro-batch: the embedding, those of one block, the head."""
    mesh, element = structure.mesh, FLOATS[dtype]
    place = dict.fromkeys(mesh, 0)
    features = 0.0
    busy: dict[str, float] = {}
    for site, layout, times in _laid_out(structure, family, sites, blocks):
        volume = site_volume(site, layout, mesh, place, element=element, backend=machine.backend)
        for move in (*volume.forward, *volume.backward):
            if not set(move.axes) & set(structure.token_axes):
                told = (move.kind, move.axes, move.size, move.sent)
                seconds = times * min(machine.collective(*told), machine.ring(*told, messages=1))
                features += seconds
                for axis in move.axes:
                    busy[axis] = busy.get(axis, 0.0) + seconds
    return Split(_products(structure, family, sites, blocks, machine), features, busy)


def split_like(
    usual: Split, structure: Structure, family: Family, sites: Sequence[Site], blocks: int, machine: Machine
) -> Split:
    """The same of a variant, in less time: what its axes move is guessed to be what its usual structure moves, and is
    nothing for a limit.
    """
    return Split(_products(structure, family, sites, blocks, machine), usual.features, {})


def _products(structure: Structure, family: Family, sites: Sequence[Site], blocks: int, machine: Machine) -> float:
    """Seconds of the products of one micro-batch, both passes."""
    here, seconds = Here(structure.mesh, dict.fromkeys(structure.mesh, 0)), 0.0
    for site, layout, times in _laid_out(structure, family, sites, blocks):
        if site is not sites[0]:  # an embedding multiplies nothing
            rows, k = here.cut(site.m, layout.m), here.cut(site.k, layout.k)
            seconds += (
                times * 3 * sum(machine.product(rows, here.cut(linear.n, layout.n), k) for linear in site.linears)
            )
    return seconds


def _laid_out(
    structure: Structure, family: Family, sites: Sequence[Site], blocks: int
) -> Iterator[tuple[Site, GridLayout, int]]:
    """(site, its layout with X kept, how often the model has it)."""
    for site in sites:
        times = 1 if site is sites[0] or site is sites[-1] else blocks
        yield site, structure.layout(site, KEEP, family.in_attention(site)), times


def formula_bound(
    structure: Structure,
    sites: Sequence[Site],
    blocks: int,
    sizes: Mapping[str, int],
    split: Split,
    machine: Machine,
    dtype: str,
    stored: str,
    memory: int,
) -> FormulaBound:
    """The limits of a structure.

    sites: as for ``split_of``. sizes: site → parameters of it that no other site has. memory: bytes that
    a device may hold.
    """
    element = FLOATS[dtype]
    products, features = split.products * structure.accumulation, split.features * structure.accumulation
    parameters = sum(sizes[site.name] * (blocks if site not in (sites[0], sites[-1]) else 1) for site in sites)
    tokens = _tokens(structure, parameters // structure.tensor * element, machine)
    most = max([products, tokens, *(seconds * structure.accumulation for seconds in split.busy.values())])
    inputs = blocks * _tokens_of(structure, sites) * sites[-1].k * element
    needed = _stored(structure, parameters, element, FLOATS[stored]) + inputs
    saved = blocks * _saved(structure, sites, element)
    recomputed = min(1.0, max(0.0, needed + saved - memory) / saved) if saved else 0.0
    return FormulaBound(most, needed, inputs, features + max(0.0, tokens - products), recomputed * products / 3)


def _tokens(structure: Structure, whole: int, machine: Machine) -> float:
    """Seconds in which gradients (and weights) of ``whole`` bytes travel over the axes that split tokens."""
    axes = structure.token_axes
    if structure.replica * structure.data == 1:
        return 0.0
    if structure.level == "replicate":
        ranks = structure.replica * structure.data
        return machine.collective("all_reduce", axes, whole, 2 * whole * (ranks - 1) // ranks)
    n = structure.data
    moved = whole * (n - 1) // n
    seconds = machine.collective("reduce_scatter", ("data",), whole, moved) if n > 1 else 0.0
    gathers = 1 if structure.level in ("optimizer", "gradients") or structure.keep else 2
    if structure.level == "parameters":
        gathers *= structure.accumulation
    return seconds + gathers * (machine.collective("all_gather", ("data",), whole, moved) if n > 1 else 0.0)


def _stored(structure: Structure, parameters: int, element: int, stored: int) -> int:
    """Bytes of a rank's parameters and moments, and of the weights that it has whole all the time."""
    local = parameters // structure.tensor
    shard = local // (structure.data if structure.level != "replicate" else 1)
    whole = local * element if structure.level in ("optimizer", "gradients") or structure.keep else 0
    return 3 * shard * stored + whole


def _tokens_of(structure: Structure, sites: Sequence[Site]) -> int:
    """Tokens of a micro-batch on one rank, between blocks."""
    return (
        sites[-1].m // (structure.replica * structure.data) // (structure.tensor if structure.stream == "split" else 1)
    )


def _saved(structure: Structure, sites: Sequence[Site], element: int) -> int:
    """Roughly what a block saves that is not recomputed: what goes into its products and comes out of them."""
    rows = element * sites[-1].m // (structure.replica * structure.data)
    stream = structure.tensor if structure.stream == "split" else 1
    hidden = sum(site.k if site.kind == "column" else site.n for site in sites[1:-1])
    inner = sum(site.n if site.kind == "column" else site.k for site in sites[1:-1])
    return rows * hidden // stream + rows * inner // structure.tensor
