"""One runtime per root DeviceMesh: the owner of its groups and its arena. The only registry of the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from shardwright._errors import InputError
from shardwright.comm.arena import Arena
from shardwright.comm.groups import AxisGroup, Groups


class Runtime:
    """What the layers of one mesh share."""

    def __init__(self, mesh: DeviceMesh, backend: str | None = None):
        if backend is None:
            backend = dist.get_backend(mesh.get_group(0))
            backend = "gloo" if backend == "fake" else backend
        self.groups = Groups(mesh, backend)
        self.arena = Arena()

    @staticmethod
    def of(mesh: DeviceMesh, backend: str | None = None) -> Runtime:
        """The runtime of the mesh (of its root, if it is a submesh), made on first use.

        backend: the declared one, by which algorithms are chosen; by default that of the mesh's groups. It is settled
        when the runtime is made. Call it first outside of any fake-tensor mode.
        """
        root = mesh._get_root_mesh()
        runtime: Runtime | None = _RUNTIMES.get(root)
        if runtime is None:
            runtime = _RUNTIMES[root] = Runtime(root, backend)
        elif backend is not None and backend != runtime.groups.backend:
            raise InputError(
                f"backend: found {backend!r}; allowed: {runtime.groups.backend!r}, as this mesh began with"
            )
        return runtime

    def group(self, axes: Sequence[str]) -> AxisGroup:
        """The group over ``axes``; no axes is a group of one."""
        return self.groups.along(axes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis → ranks along it, in mesh order."""
        return self.groups.sizes


_RUNTIMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
