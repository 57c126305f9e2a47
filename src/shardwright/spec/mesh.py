"""Mesh shapes as data: ordered axes and sizes, and where a rank sits among them. No process group lives here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from shardwright.errors import InputError


def parse_mesh(text: str) -> dict[str, int]:
    """``"data=2,tensor=4"`` → ``{"data": 2, "tensor": 4}``; the order is the mesh's, the first axis the slowest."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (name and equals and size.isdigit() and int(size) > 0) or name in axes:
            raise InputError(f"mesh: found {text!r}; allowed: axis=size pairs such as data=2,tensor=4")
        axes[name] = int(size)
    return axes


def world_size(axes: Mapping[str, int]) -> int:
    """Ranks of the whole mesh."""
    return math.prod(axes.values())


def size_along(axes: Mapping[str, int], along: Iterable[str]) -> int:
    """Ranks along the axes ``along`` together; 1 for none."""
    return math.prod(axes[axis] for axis in along)


def coordinates(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Where ``rank`` sits on every axis, the last axis running fastest."""
    if not 0 <= rank < world_size(axes):
        raise InputError(f"rank: found {rank}; allowed: 0 to {world_size(axes) - 1}")
    place: dict[str, int] = {}
    for name, size in reversed(list(axes.items())):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in axes}


def ranks_along(rank: int, along: Sequence[str], axes: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` only on the axes ``along``, in mesh order (``along`` in any order)."""
    return ranks_at(coordinates(rank, axes), along, axes)


def ranks_at(place: Mapping[str, int], along: Collection[str], axes: Mapping[str, int]) -> tuple[int, ...]:
    """As ``ranks_along``, of the rank at ``place`` (mesh axis → coordinate)."""
    ranks = [0]
    for name, size in axes.items():
        here = range(size) if name in along else (place[name],)
        ranks = [r * size + i for r in ranks for i in here]
    return tuple(ranks)


def chunk(length: int, ranks: int, index: int) -> tuple[int, int]:
    """[start, stop) of the ``index``-th of ``ranks`` pieces, as DTensor cuts: ⌈length/ranks⌉ each, the last shorter."""
    piece = -(-length // ranks)
    return min(index * piece, length), min((index + 1) * piece, length)


def nested_chunk(length: int, sizes: Sequence[int], index: int) -> tuple[int, int]:
    """[start, stop) of the ``index``-th piece where axis after axis cuts what the one before left, each by ``chunk``.

    sizes: ranks along each axis, the slowest first; that is how DTensor cuts one dimension by several axes. Where the
    product of the sizes divides the length, or there is one axis, it is ``chunk`` over them all.
    """
    start, stop, ranks = 0, length, math.prod(sizes)
    for size in sizes:
        ranks //= size
        place, index = divmod(index, ranks)
        low, high = chunk(stop - start, size, place)
        start, stop = start + low, start + high
    return start, stop
