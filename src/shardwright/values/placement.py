"""How a whole tensor is cut into this rank's shard: one rule for building, initialising and loading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright import trace
from shardwright.spec.mesh import chunk

Ranges = tuple[tuple[int, int], ...]
"""Pieces [start, stop) of one dimension, which the shard holds one after the other."""


@dataclass(frozen=True)
class Cut:
    """The part of a whole tensor of ``shape`` that one rank holds: pieces of every dimension."""

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shard's shape."""
        return tuple(sum(stop - start for start, stop in pieces) for pieces in self.ranges)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The shard of ``whole``, in storage of its own."""
        for dim, pieces in enumerate(self.ranges):
            parts = [whole.narrow(dim, start, stop - start) for start, stop in pieces]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return whole.detach().clone(memory_format=torch.contiguous_format)


def cut_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], place: Sequence[int] | None = None
) -> Cut:
    """What this rank holds of a tensor of ``shape``, as DTensor cuts it: axis after axis in mesh order.

    place: of another rank, by its coordinates in ``mesh``; the first one on every axis holds most.
    """
    place = mesh.get_coordinate() if place is None else place
    assert place is not None, "the rank is not in the mesh"
    ranges: list[Ranges] = [((0, length),) for length in shape]
    for size, index, placement in zip(mesh.shape, place, placements, strict=True):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        held = ranges[placement.dim]
        length = sum(stop - start for start, stop in held)
        groups = placement.split_factor if isinstance(placement, _StridedShard) else 1
        width = length // groups if groups > 1 else length
        start, stop = chunk(width, size, index)
        pieces = [
            piece for group in range(groups) for piece in _within(held, group * width + start, group * width + stop)
        ]
        ranges[placement.dim] = tuple(pieces) or ((held[-1][1], held[-1][1]),)
    return Cut(tuple(shape), tuple(ranges))


def _within(pieces: Ranges, start: int, stop: int) -> list[tuple[int, int]]:
    """Positions [start, stop) of the pieces laid one after the other, as pieces of the whole."""
    found, before = [], 0
    for low, high in pieces:
        first, last = max(start - before, 0), min(stop - before, high - low)
        if first < last:
            found.append((low + first, low + last))
        before += high - low
    return found


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's shard of ``whole``, in storage of its own."""
    return cut_of(whole.shape, mesh, placements).of(whole)


def make_parameter(
    local: torch.Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    requires_grad: bool = True,
) -> torch.nn.Parameter:
    """A DTensor parameter of global ``shape`` around this rank's shard; no collective is made."""
    trace.note(local, "parameter")
    with trace.quiet():
        whole: Any = wrap(local, shape, mesh, placements).requires_grad_(requires_grad)
    whole._is_param = True  # as nn.Parameter makes one of a subclass; its detach() would cost DTensor milliseconds
    return cast(torch.nn.Parameter, whole)


def wrap(local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A DTensor of global ``shape`` (row-major) around ``local``."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    whole: torch.Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of a DTensor, in the same storage; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
