"""Site: one place in a model where one tensor meets one or more linears, and the edges that join sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright._errors import InputError
from shardwright.layout import GridLayout


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
        return math.prod(sizes[axis] for axis in axes)

    over = ranks(layout.n)
    for linear in site.linears:
        if linear.unit == 1 and linear.groups == 1:
            continue
        shared = linear.sharable and over % linear.units == 0
        if linear.units % over and not shared:
            allowed = f"a multiple of {'×'.join(layout.n)} = {over}" + (
                ", or a divisor of it" if linear.sharable else ""
            )
            raise InputError(f"{site.name}: heads of {linear.name} is {linear.units}; allowed: {allowed}")
    over = ranks(layout.k)
    if site.k_unit > 1 and site.k // site.k_unit % over:
        heads = site.k // site.k_unit
        raise InputError(f"{site.name}: heads is {heads}; allowed: a multiple of {'×'.join(layout.k)} = {over}")


def check_edges(sites: Sequence[Site], layouts: Mapping[str, GridLayout]) -> None:
    """Raises InputError where the layout that a site leaves is not the one that the next takes.

    Tokens must be split by the same axes on both ends; features by the axes that the next site uses as k (none along
    the residual stream).
    """
    by_name = {site.name: site for site in sites}
    for site in sites:
        out = layouts[site.name]
        for name in site.after:
            into = layouts[by_name[name].name]
            left, taken = out.output_token_axes, into.input_token_axes
            if left != taken:
                raise InputError(
                    f"layouts: {site.name} leaves tokens split by ({', '.join(left)}), {name} takes them split by "
                    f"({', '.join(taken)}); allowed: the same axes on both ends of an edge"
                )
            features = () if site.hidden else out.n
            if features != into.k or (site.hidden and out.n):
                raise InputError(
                    f"layouts: {site.name} leaves features split by ({', '.join(out.n)}), {name} takes them split by "
                    f"({', '.join(into.k)}); allowed: the same axes on both ends of an edge"
                )
