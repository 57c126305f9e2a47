"""What a rank holds of a tensor, as boxes of the whole: how shards of any layout are told to others, and to files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwright.values.placement import Cut, Ranges, cut_of, local_of


@dataclass(frozen=True, order=True)
class Box:
    """A box of a whole tensor: ``shape`` elements from ``offsets`` on, in every dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the tensor that it is a box of."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.shape, strict=True))


def boxes(cut: Cut) -> Iterator[tuple[Box, Box]]:
    """(the box of the whole, the box of the shard) of every piece of a shard; none of a shard that is empty."""
    for pieces in itertools.product(*map(_with_places, cut.ranges)):
        shape = tuple(stop - start for start, stop, _ in pieces)
        if math.prod(shape):
            yield Box(tuple(start for start, _, _ in pieces), shape), Box(tuple(place for *_, place in pieces), shape)


def _with_places(ranges: Ranges) -> list[tuple[int, int, int]]:
    """(start, stop, where the piece begins in the shard) along one dimension."""
    lengths = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
    return [(start, stop, place) for (start, stop), place in zip(ranges, lengths, strict=False)]


def held_pieces(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """(the box of the whole, this rank's values: a view) of every piece that this rank holds of ``tensor``.

    tensor: a DTensor, or a plain tensor that every rank holds whole. Writing to a view writes to the tensor.
    """
    local = local_of(tensor).detach()
    for whole, mine in boxes(held_cut(tensor)):
        yield whole, local[mine.slices]


def held_cut(tensor: torch.Tensor) -> Cut:
    """The part of ``tensor`` that this rank holds."""
    if isinstance(tensor, DTensor):
        return cut_of(tensor.shape, tensor.device_mesh, tensor.placements)
    return Cut(tuple(tensor.shape), tuple(((0, length),) for length in tensor.shape))
