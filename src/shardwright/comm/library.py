"""What torch tells of the libraries behind process groups: which one serves a device, and how long a wait may take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import InputError


def declared_backend(mesh: DeviceMesh) -> str:
    """The library that serves the mesh's device: groups may have one for each (``cpu:gloo,cuda:nccl``).

    A rehearsal's is taken for gloo. Raises InputError for one that we do not know the rules of.
    """
    group = mesh.get_group(0)
    by_device = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    backend = by_device.get(mesh.device_type, dist.get_backend(group))
    if backend not in ("gloo", "nccl", "fake"):
        raise InputError(f"mesh: found groups of {backend!r}; allowed: gloo, nccl")
    return "gloo" if backend == "fake" else backend


def stated_timeout(group: dist.ProcessGroup, device: str) -> timedelta | None:
    """How long a wait may take: what was stated for the group, else for the whole job (``init_process_group``).

    A mesh makes its groups with torch's own timeout, whatever was stated for the job. None where nothing tells.
    """
    own = timeout_of(group, device)
    if dist.group.WORLD is None or own not in (
        None,
        dist.distributed_c10d._get_default_timeout(dist.get_backend(group)),
    ):
        return own
    return timeout_of(dist.group.WORLD, device) or own


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta | None:
    """How long the group's library waits; None where it does not tell."""
    try:
        library = group._get_backend(torch.device(device))
    except RuntimeError:  # a process group that has no library behind it
        return None
    timeout = getattr(getattr(library, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def few(ranks: Sequence[int]) -> str:
    """Ranks as a message names them."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, …, {ranks[-1]} ({len(ranks)})"
