"""Site: one place in a model where one tensor meets one or more linears, and what must stay whole there."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import InputError
from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import nested_chunk, size_along


@dataclass(frozen=True)
class Linear:
    """One linear of a site.

    name: qualified module name, e.g. ``model.layers.0.self_attn.q_proj``.
    n: output features. unit: features that stay together when n is split (a head's size; 1 where any cut is right).
    groups: n is that many equal parts, each split on its own (3 for fused q, k, v).
    sharable: units may be held by several ranks (key/value heads), where there are fewer of them than ranks.
    """

    name: str
    n: int
    unit: int = 1
    groups: int = 1
    sharable: bool = False

    @property
    def units(self) -> int:
        """How many pieces of one group can be told apart."""
        return self.n // self.groups // self.unit


@dataclass(frozen=True)
class Site:
    """X[M,K] meets ``linears``, whose weights are W_i[n_i,K].

    kind: ``column`` where the features of Y go on split to the next site, ``row`` where the features of X came split.
    k_unit: features of K that stay together when K is split.
    after: names of the sites that take this site's output; hidden: they take it through the residual stream
        (tokens split, features whole) rather than feature by feature.
    An embedding is a row site whose X is the one-hot matrix of the tokens and whose K is the vocabulary.
    """

    name: str
    kind: str
    m: int
    k: int
    linears: tuple[Linear, ...]
    k_unit: int = 1
    after: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def n(self) -> int:
        """Output features of all linears together."""
        return sum(linear.n for linear in self.linears)


def check_divides(site: Site, layout: GridLayout, sizes: Mapping[str, int]) -> None:
    """Raises InputError where the layout cuts what must stay whole.

    Tokens and plain features may be cut unevenly (the last ranks get less, or nothing). Heads may not: they must divide
    by the ranks, or be sharable and the ranks divide by them. sizes: mesh axis → number of ranks along it.
    """
    for axis in layout.axes:
        if axis not in sizes:
            raise InputError(f"{site.name}: layout names axis {axis!r}; allowed: the mesh's axes ({', '.join(sizes)})")

    def ranks(axes: Sequence[str]) -> int:
        return size_along(sizes, axes)

    over = ranks(layout.output_feature_axes)
    for linear in site.linears:
        if linear.unit == 1 and linear.groups == 1:
            continue
        shared = linear.sharable and over % linear.units == 0 and layout.output_feature_axes == layout.n
        if linear.units % over and not shared:
            allowed = f"a multiple of {'×'.join(layout.output_feature_axes)} = {over}" + (
                ", or a divisor of it" if linear.sharable else ""
            )
            raise InputError(f"{site.name}: heads of {linear.name} is {linear.units}; allowed: {allowed}")
    over = ranks(layout.input_feature_axes)
    if site.k_unit > 1 and site.k // site.k_unit % over:
        heads = site.k // site.k_unit
        raise InputError(
            f"{site.name}: heads is {heads}; allowed: a multiple of {'×'.join(layout.input_feature_axes)} = {over}"
        )


def exchanged_axes(qkv: GridLayout, batch: Collection[str]) -> tuple[str, ...]:
    """The axes that split tokens where q, k, v leave their site, and heads while attention is at work.

    Attention needs whole sequences. batch: the axes that split the batch, which never cut one.
    """
    return tuple(axis for axis in qkv.output_token_axes if axis not in batch)


def gathers_heads(linear: Linear, queries: int, over: int, exchanged: int) -> bool:
    """Tokens are gathered, since heads of ``linear`` cannot be exchanged for them along with those of the queries.

    queries: heads of a rank before the exchange. over: ranks that split heads for good. exchanged: those that split the
    tokens.
    """
    held = held_heads(linear, over)
    return held != queries and held % exchanged != 0


def held_heads(linear: Linear, over: int) -> int:
    """Heads of ``linear`` that a rank reads where ``over`` ranks split them: one, where they are fewer than those."""
    return linear.units // over if linear.units % over == 0 else 1


def check_heads(qkv: Site, layout: GridLayout, batch: Collection[str], sizes: Mapping[str, int]) -> None:
    """Raises InputError where attention cannot have whole sequences: every rank that then splits heads needs one.

    batch: the axes that split the batch. sizes: mesh axis → number of ranks along it.
    """
    exchanged = [axis for axis in sizes if axis in exchanged_axes(layout, batch)]
    ranks = [sizes[axis] for axis in exchanged]
    if math.prod(ranks) == 1:
        return
    queries, names = qkv.linears[0], ", ".join(exchanged)
    by_m = [axis for axis in exchanged if axis in layout.m]
    ways = [f"a batch that divides by {'×'.join(by_m)} = {size_along(sizes, by_m)}"] if by_m else []
    ways += ["layout.y replicated"] if len(by_m) < len(exchanged) else []
    if queries.groups > 1:
        raise InputError(
            f"{qkv.name}: found tokens split by ({names}), and queries, keys and values in one linear; allowed: "
            f"{' and '.join(ways)}"
        )
    over = size_along(sizes, layout.output_feature_axes)
    held = held_heads(queries, over)
    if any(start == stop for start, stop in (nested_chunk(held, ranks, i) for i in range(math.prod(ranks)))):
        raise InputError(
            f"{qkv.name}: heads of {queries.name} is {queries.units}, which leaves some rank none, since tokens are "
            f"split by ({names}); allowed: a multiple of {'×'.join((*layout.output_feature_axes, *exchanged))} = "
            f"{over * math.prod(ranks)}, or {' and '.join(ways)}"
        )
