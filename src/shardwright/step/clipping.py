"""Norms and clipping of gradients, whatever meshes they lie on: every element counts once.

On each rank the norms of its pieces are added up in float64; one small collective joins those of all ranks. A shard
counts where it lies; what several ranks hold alike counts on the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright import trace
from shardwright.comm.collectives import all_reduce
from shardwright.comm.groups import AxisGroup
from shardwright.errors import InputError
from shardwright.runtime.runtime import Runtime
from shardwright.values.placement import local_of

PIECE = 2**20
"""Elements whose norm is taken at once: the float64 copy that this may cost stays at 8 MiB."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales all gradients by max_norm / (norm + 1e-6) where that is below 1, in place; returns the norm before.

    As ``grad_norm``, which it calls. Raises RuntimeError for a norm that is not finite, if ``error_if_nonfinite``;
    else such a norm goes through: gradients become NaN, or 0 where the norm is infinite and they are not.
    """
    parameters = _listed(parameters)
    norm = grad_norm(parameters, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: found a gradient norm of {norm.item()}; allowed: a finite one, with error_if_nonfinite"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for gradient in _gradients(parameters):
            local = local_of(gradient).detach()
            local.mul_(factor.to(local.device, local.dtype))
    return norm


def grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients together as one vector: a float64 tensor [], the same on all ranks.

    parameters: those without a gradient count as zeros; one that is listed twice counts once. Gradients may be DTensors
    on any meshes over the same ranks, and on parts of such a mesh; a plain gradient is one that all ranks hold alike.
    norm_type: above 0, ``inf`` for the largest element.

    Every rank calls it with the same parameters. Raises InputError for another norm_type, meshes over different ranks,
    and gradients that are not summed yet.
    """
    parameters = _listed(parameters)
    if not norm_type > 0:
        raise InputError(f"norm_type: found {norm_type}; allowed: a number above 0, or inf")
    gradients = _gradients(parameters)
    group = _group_of([tensor for tensor in (*parameters, *gradients) if isinstance(tensor, DTensor)])
    first = group.ranks[0] if group is not None else None
    counted = [local_of(gradient).detach() for gradient in gradients if _counts_here(gradient, first)]
    device = next((tensor.device for tensor in map(local_of, (*gradients, *parameters))), torch.device("cpu"))
    pieces = [piece for tensor in counted for piece in tensor.flatten().split(PIECE) if piece.numel()]
    norm = _joined([_norm(piece, norm_type).to(device) for piece in pieces], norm_type, device)
    if group is None or group.size == 1:
        return norm
    of_ranks = torch.zeros(group.size, dtype=torch.float64, device=device)  # a maximum over ranks would lose a NaN
    of_ranks[group.index] = norm
    all_reduce(of_ranks, group, "clip_grad_norm_")
    return _joined(list(of_ranks), norm_type, device)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found = {id(parameter): parameter.grad for parameter in parameters}
    return [gradient for gradient in found.values() if gradient is not None]


def _norm(piece: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64)
    return norm


def _joined(norms: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of a vector whose parts have ``norms``."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return _norm(torch.stack(norms), norm_type)


def _counts_here(gradient: torch.Tensor, first: int | None) -> bool:
    """Whether this rank is the one that counts what it holds of ``gradient``; first: the first of all ranks."""
    if not isinstance(gradient, DTensor):
        return first is None or dist.get_rank() == first
    if any(placement.is_partial() for placement in gradient.placements):
        raise InputError(
            f"gradient: found placements {gradient.placements}; allowed: Shard and Replicate, summed outside no_sync"
        )
    mesh = gradient.device_mesh
    place = mesh.get_coordinate()
    if place is None or first not in _ranks(mesh):  # the part of a mesh that the first rank is on counts
        return False
    return all(
        index == 0 for index, placement in zip(place, gradient.placements, strict=True) if placement.is_replicate()
    )


def _group_of(tensors: list[DTensor]) -> AxisGroup | None:
    """The ranks of all meshes: those of their root meshes, which must be the same. None without any."""
    roots: dict[tuple[int, ...], DeviceMesh] = {}
    for tensor in tensors:
        root = tensor.device_mesh._get_root_mesh()
        roots.setdefault(tuple(sorted(_ranks(root))), root)
    if len(roots) > 1:
        raise InputError(f"gradient: found meshes over ranks {' and '.join(map(str, roots))}; allowed: the same ranks")
    for ranks, root in roots.items():
        if ranks == tuple(range(dist.get_world_size())):
            names = tuple(root.mesh_dim_names or ())
            world = dist.group.WORLD
            return AxisGroup(names, ranks, dist.get_rank(), dist.get_backend(), world, (len(ranks),))
        return Runtime.of(root).group(root.mesh_dim_names or ())
    return None


def _ranks(mesh: DeviceMesh) -> list[int]:
    with unset_fake_temporarily(), trace.quiet():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks
