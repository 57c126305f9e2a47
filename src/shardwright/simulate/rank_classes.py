"""Classes of equal ranks: those whose place on the mesh gives them the same sizes do the same, so one speaks for all.

Whatever divides gives every rank the same. What does not is cut into pieces of which the last are smaller or empty
(mesh.chunk); ranks are told apart by every such piece that they hold. Rather one class too many than one too few: where
activations are cut unevenly, pieces arrive in another order on every rank, so that its place in the group counts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shardwright.families.decoder import head_size
from shardwright.families.table import family_of, has_rule
from shardwright.formulas.place import Here
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import coordinates, size_along
from shardwright.spec.plan import Plan
from shardwright.spec.site import Linear, Site


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same; the first of them speaks for all."""

    ranks: tuple[int, ...]

    @property
    def representative(self) -> int:
        """The rank that is rehearsed."""
        return self.ranks[0]


@dataclass(frozen=True)
class _HeldPart:
    """What ranks hold of ``length``, cut by ``axes`` one after the other, then by ``over`` as one axis.

    each: how much one of ``length`` is, for the second cut. ordered: where ranks hold unlike pieces, a rank's place
    counts too.
    """

    length: int
    axes: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    each: int = 1
    joined: bool = True
    ordered: bool = False

    def size(self, here: Here) -> int:
        """How much the rank holds."""
        group = here.group(self.over)
        return (group.joined() if self.joined else group).part(here.cut(self.length, self.axes) * self.each)

    def stages(self, order: Sequence[str]) -> Iterator[_HeldPart]:
        """What is left after each axis, in the mesh's order, and the piece itself: a group holds the one before."""
        axes = [axis for axis in order if axis in self.axes]
        yield from (_HeldPart(self.length, tuple(axes[:stop]), ordered=self.ordered) for stop in range(1, len(axes)))
        yield replace(self, over=())
        yield self


def rank_classes(config: Any, plan: Plan) -> tuple[RankClass, ...]:
    """The classes of the plan's ranks, in the order of their first ranks.

    config: a path of a config.json, or a Hugging Face config.
    """
    if isinstance(config, str) or hasattr(config, "read_text"):
        config = load_config(config)
    pieces = {stage for piece in _pieces(config, plan) for stage in piece.stages([*plan.mesh])}
    tellers = [teller for piece in pieces for teller in _teller(piece, plan)]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        place = tuple(coordinates(rank, plan.mesh).values()) if tellers else ()
        key = tuple(told[tuple(place[position] for position in positions)] for positions, told in tellers)
        found.setdefault(key, []).append(rank)
    return tuple(RankClass(tuple(ranks)) for ranks in found.values())


Teller = tuple[tuple[int, ...], dict[tuple[int, ...], int]]
"""(positions of axes in the mesh, places on these axes → what tells ranks apart)."""


def _teller(piece: _HeldPart, plan: Plan) -> Iterator[Teller]:
    """What tells ranks apart by a piece; nothing where all hold as much."""
    order = list(plan.mesh)
    axes = [axis for axis in order if axis in piece.axes + piece.over]
    sizes: dict[tuple[int, ...], int] = {}
    for places in product(*(range(plan.mesh[axis]) for axis in axes)):
        here = Here(plan.mesh, dict.fromkeys(order, 0) | dict(zip(axes, places, strict=True)))
        sizes[places] = piece.size(here)
    if len(set(sizes.values())) > 1:
        told = {places: number for number, places in enumerate(sizes)} if piece.ordered else sizes
        yield tuple(order.index(axis) for axis in axes), told


def _pieces(config: Any, plan: Plan) -> Iterator[_HeldPart]:
    """Everything that is cut, each way of cutting once."""
    if not has_rule(config):
        rows = {parameter.shape[0] for parameter in build_meta(config).parameters() if parameter.shape}
        yield _HeldPart(plan.micro_batch, plan.data_axes)
        yield from _stored({(length, (), 1) for length in rows}, {plan.data_axes, *_storing(plan)})
        return
    family = family_of(config)
    sites = family.sites(config, plan.micro_batch * plan.sequence)
    alike = {(plan.layout_for(site), site.k, tuple(linear.n for linear in site.linears)): site for site in sites}
    stream = plan.layout_for(sites[0])
    cuts: set[Dimension] = {(config.hidden_size, stream.output_feature_axes, 1)}
    if family.head_norms:
        cuts.add((head_size(config), (), 1))
    if family.positions is not None:
        cuts.add((config.max_position_embeddings, (), 1))
    stored = _storing(plan)
    over = set[tuple[str, ...]]()
    for (layout, _, _), site in alike.items():
        yield from _activations(site, layout, plan)
        cuts.add((site.k, layout.k, 1))
        cuts |= {_features(linear, layout, plan) for linear in site.linears}
        partial = (layout.m, layout.m + layout.n, layout.output_token_axes, layout.n + layout.output_token_axes)
        axes = stored | {layout.axes_where("w", "sharded")}
        over |= {tuple(axis for axis in each if axis in split) for each in axes for split in partial}
    yield from _stored(cuts, over)


def _storing(plan: Plan) -> set[tuple[str, ...]]:
    """The axes over which some unit is stored."""
    found = [stored.axes or plan.data_axes for stored in plan.params.values() if stored.level != "replicate"]
    return {(axes,) if isinstance(axes, str) else tuple(axes) for axes in found}


def _activations(site: Site, layout: GridLayout, plan: Plan) -> Iterator[_HeldPart]:
    """Sequences, tokens and features of X and Y."""
    for token_axes in (layout.input_token_axes, layout.output_token_axes):
        others = tuple(axis for axis in token_axes if axis not in layout.m)
        yield _HeldPart(plan.micro_batch, layout.m, others, each=plan.sequence, joined=False, ordered=others != ())
    yield _HeldPart(site.k, layout.input_feature_axes, ordered=layout.input_feature_axes != layout.k)
    for linear in site.linears:
        axes = layout.output_feature_axes
        yield _HeldPart(linear.n // linear.groups, axes, ordered=axes != layout.n)


Dimension = tuple[int, tuple[str, ...], int]
"""(length, axes that cut it, how many such lengths lie one after the other) of a parameter."""


def _features(linear: Linear, layout: GridLayout, plan: Plan) -> Dimension:
    """The rows of W: units that are fewer than the ranks (key/value heads) are held one by each."""
    if linear.sharable and linear.units % size_along(plan.mesh, layout.n):
        return linear.unit, (), 1
    return linear.n // linear.groups, layout.n, linear.groups


def _stored(cuts: set[Dimension], over: set[tuple[str, ...]]) -> Iterator[_HeldPart]:
    """Dimensions of parameters, and their rows where storage is split."""
    for length, axes, each in cuts:
        yield from (_HeldPart(length, axes, split, each) for split in {(), *over} if not {*axes} & {*split})
