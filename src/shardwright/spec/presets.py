"""Presets: layouts by name. A preset is a function site → GridLayout; its keywords are the mesh axes that it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from shardwright.errors import InputError
from shardwright.spec.layout import GridLayout
from shardwright.spec.site import Site


def replicate(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """Data parallel (DDP): tokens split over ``data``; weights whole; ``tensor``, if there is one, is idle."""
    return GridLayout(m=(data,))


def tensor_all_reduce(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """Tensor parallel, all-reduce mode: hidden states whole on every tensor rank.

    Column sites: dX all-reduced in backward. Row sites: Y all-reduced in forward.
    """
    if site.kind == "column":
        return GridLayout(m=(data,), n=(tensor,), x="replicated")
    return GridLayout(m=(data,), k=(tensor,), y="replicated")


def sequence_parallel(site: Site, *, data: str = "data", tensor: str = "tensor", save_x: str = "shard") -> GridLayout:
    """Tensor parallel with tokens of the hidden states split over ``tensor`` (gather/scatter mode).

    Column sites: X gathered, dX reduce-scattered; backward keeps the shard and gathers again, or keeps the gathered X
    (``save_x="gathered"``). Row sites: Y reduce-scattered, dY gathered.
    """
    if site.kind == "column":
        return GridLayout(m=(data,), n=(tensor,), x="sharded", save_x=save_x)
    return GridLayout(m=(data,), k=(tensor,), y="sharded")


def sequence_parallel_async(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """``sequence_parallel`` whose collectives run beside the products that do not need them."""
    return replace(sequence_parallel(site, data=data, tensor=tensor), overlap="async")


def sequence_parallel_ring(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """``sequence_parallel`` whose operands travel around the axis in pieces, never gathered."""
    return replace(sequence_parallel(site, data=data, tensor=tensor), overlap="ring")


def sequence_parallel_keep(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """``sequence_parallel`` that keeps the gathered input for backward instead of gathering it again."""
    return sequence_parallel(site, data=data, tensor=tensor, save_x="gathered")


# The presets of grids. Consecutive sites swap the roles of j and l: what a column site splits by n, the row site behind
# it splits by k, and the other way round, so that edges join without a conversion. In the mesh, i (and d) come before j
# and l.


def _swapped(site: Site, first: str, second: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(n, k) of a site: first, second of a column site, the other way round of a row site."""
    return ((first,), (second,)) if site.kind == "column" else ((second,), (first,))


def grid_scatter(site: Site, *, i: str = "i", j: str = "j", k: str = "l") -> GridLayout:
    """3D, design 1: X and W gathered, Y reduce-scattered. Of P ranks each keeps 1/P of every activation and weight.

    Column sites: X [M/(i·j), K/l] gathered over j, W over i, Y [M/(i·l), N/j] reduce-scattered over l.
    """
    by_n, by_k = _swapped(site, j, k)
    return GridLayout(m=(i,), n=by_n, k=by_k, x="sharded", w="sharded", y="sharded")


def grid_reduce(site: Site, *, i: str = "i", j: str = "j", k: str = "l") -> GridLayout:
    """3D, design 2: W gathered, Y all-reduced. Activations are split over two axes, weights over three.

    Column sites: X [M/i, K/l] whole over j (dX all-reduced), Y [M/i, N/j] all-reduced over l.
    """
    by_n, by_k = _swapped(site, j, k)
    return GridLayout(m=(i,), n=by_n, k=by_k, x="replicated", w="sharded", y="replicated")


def grid_2d(site: Site, *, i: str = "i", j: str = "j") -> GridLayout:
    """2D, gather form: X [M/i, K/j] gathered along its features, W over i; Y [M/i, N/j] comes out whole."""
    return GridLayout(m=(i,), n=(j,), x="sharded-features", w="sharded")


def grid_25d(site: Site, *, i: str = "i", d: str = "d", j: str = "j") -> GridLayout:
    """2.5D: ``grid_2d`` with tokens split over d too, and a copy of W on each of its ranks (dW all-reduced over d)."""
    return GridLayout(m=(i, d), n=(j,), x="sharded-features", w={i: "sharded", d: "replicated"})


presets: dict[str, Callable[[Site], GridLayout]] = {
    "replicate": replicate,
    "tensor-all-reduce": tensor_all_reduce,
    "sequence-parallel": sequence_parallel,
    "sequence-parallel-keep": sequence_parallel_keep,
    "sequence-parallel-async": sequence_parallel_async,
    "sequence-parallel-ring": sequence_parallel_ring,
    "grid-scatter": grid_scatter,
    "grid-reduce": grid_reduce,
    "grid-2d": grid_2d,
    "grid-25d": grid_25d,
}
"""Presets by the name that plan files and ``--layout`` use."""


def preset(name: str) -> Callable[[Site], GridLayout]:
    """The preset of that name; InputError names those that exist."""
    if name not in presets:
        raise InputError(f"layout: found {name!r}; allowed: {', '.join(presets)}")
    return presets[name]


def axes_of(layout: GridLayout | str, role: Literal["m", "axes"]) -> set[str]:
    """Axes that a layout uses (as m, or in any role); a preset is asked for both kinds of site."""
    if isinstance(layout, GridLayout):
        return set(getattr(layout, role))
    probes = (Site(name="", kind=kind, m=0, k=0, linears=()) for kind in ("column", "row"))
    return {axis for probe in probes for axis in getattr(preset(layout)(probe), role)}
