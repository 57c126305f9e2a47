"""How a whole tensor is cut into this rank's shard: one slice function for building, initialising and loading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard


def local_slices(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """The part of a whole tensor of ``shape`` that this rank holds, one slice a dimension, as DTensor cuts it.

    Axes cut in mesh order; n ranks cut a length L into pieces of ⌈L/n⌉, the last ones shorter or empty.
    """
    place = mesh.get_coordinate()
    assert place is not None, "the rank is not in the mesh"
    bounds = [(0, length) for length in shape]
    for size, index, placement in zip(mesh.shape, place, placements, strict=True):
        if isinstance(placement, Shard):
            low, high = bounds[placement.dim]
            piece = -(-(high - low) // size)
            bounds[placement.dim] = (min(low + index * piece, high), min(low + (index + 1) * piece, high))
    return tuple(slice(low, high) for low, high in bounds)


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's shard of ``whole``, in storage of its own."""
    return whole.detach()[local_slices(whole.shape, mesh, placements)].clone(memory_format=torch.contiguous_format)


def make_parameter(
    local: torch.Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    requires_grad: bool = True,
) -> torch.nn.Parameter:
    """A DTensor parameter of global ``shape`` around this rank's shard; no collective is made."""
    return torch.nn.Parameter(wrap(local, shape, mesh, placements), requires_grad=requires_grad)


def wrap(local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A DTensor of global ``shape`` (row-major) around ``local``."""
    stride = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        stride[dim] = stride[dim + 1] * shape[dim + 1]
    size = torch.Size(shape)
    whole: torch.Tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=tuple(stride))
    return whole
