"""Dense float64 references, and the cut of whole tensors into what each rank holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwright.values.placement import cut


def mesh_of(**axes: int) -> DeviceMesh:
    """The gloo mesh of these axes over all ranks of the pool, e.g. ``mesh_of(data=2, tensor=2)``; made once."""
    assert dist.get_world_size() == torch.Size(axes.values()).numel()
    return _mesh(tuple(axes.items()))


@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))


def random(*shape: int, seed: int) -> torch.Tensor:
    """The same float64 tensor on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    """This rank's part, in storage of its own."""
    return cut(whole, mesh, [_positive(p, whole.dim()) for p in placements])


def whole(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    """What the parts of all ranks make."""
    return DTensor.from_local(local.detach().contiguous(), mesh, placements, run_check=False).full_tensor()


def _positive(placement, ndim: int):
    if placement.is_shard() and placement.dim < 0:
        return type(placement)(placement.dim + ndim)
    return placement


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; NaN counts as infinite (Python's max would swallow it)."""
    difference = (a - b).abs().max()
    return float("inf") if torch.isnan(difference) else difference.item()
