"""Site: one place in a model where one tensor meets one or more linears, and the edges that join sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright._errors import InputError
from shardwright.layout import GridLayout


@dataclass(frozen=True)
class Linear:
    """One linear of a site.

    name: qualified module name, e.g. ``model.layers.0.self_attn.q_proj``.
    n: output features. unit: features that stay together when n is split (a head's size; 1 where any cut is right).
    """

    name: str
    n: int
    unit: int = 1


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
    """Raises InputError unless every size that the layout splits divides by the axes that split it.

    sizes: mesh axis → number of ranks along it.
    """

    def need(what: str, count: int, axes: Sequence[str]) -> None:
        ranks = 1
        for axis in axes:
            if axis not in sizes:
                raise InputError(
                    f"{site.name}: layout names axis {axis!r}; allowed: the mesh's axes ({', '.join(sizes)})"
                )
            ranks *= sizes[axis]
        if count % ranks:
            raise InputError(f"{site.name}: {what} is {count}; allowed: a multiple of {'×'.join(axes)} = {ranks}")

    need("tokens", site.m, layout.input_token_axes)
    need("tokens", site.m, layout.output_token_axes)
    for linear in site.linears:
        what = f"output features of {linear.name}" if linear.unit == 1 else f"heads of {linear.name}"
        need(what, linear.n // linear.unit, layout.n)
    need("input features" if site.k_unit == 1 else "heads", site.k // site.k_unit, layout.k)


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
