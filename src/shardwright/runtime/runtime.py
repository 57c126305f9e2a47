"""One runtime per root DeviceMesh: the owner of its groups, arena and buckets. The only registry of the library."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from shardwright import trace
from shardwright.comm.agreement import Agreement
from shardwright.comm.groups import AxisGroup, Groups
from shardwright.comm.library import declared_backend
from shardwright.errors import InputError
from shardwright.runtime.arena import Arena
from shardwright.runtime.bins import Bins


class Runtime:
    """What the layers of one mesh share."""

    def __init__(self, mesh: DeviceMesh, backend: str | None = None):
        self.groups = Groups(mesh, backend or declared_backend(mesh))
        self.arena = Arena()
        self._mesh = weakref.ref(mesh)
        self._arrangements: dict[tuple[tuple[str, ...], ...], DeviceMesh] = {}
        self._buckets: dict[tuple[tuple[int, ...], torch.dtype, torch.device], Bins] = {}
        self._agreements: dict[tuple[int, ...], Agreement] = {}
        self.left_gathered: weakref.ref[Any] | None = None  # whose forward ended last, with W gathered

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

    def agreement(self, group: AxisGroup) -> Agreement:
        """How the group's ranks tell each other what they are about to do: one for all groups of equal members.

        Made on first use, by every member.
        """
        key = tuple(sorted(group.ranks))
        if key not in self._agreements:
            self._agreements[key] = Agreement(group)
        return self._agreements[key]

    def bucket(self, group: AxisGroup, dtype: torch.dtype, device: torch.device) -> Bins:
        """Where small gradients that travel as ``dtype`` between the group's ranks wait for each other.

        One for all groups of equal members.
        """
        key = group.ranks, dtype, device
        if key not in self._buckets:
            self._buckets[key] = Bins(group, dtype, device, self.arena)
        return self._buckets[key]

    def storage_mesh(self, axes: tuple[str, ...], base: DeviceMesh | None = None) -> DeviceMesh:
        """The mesh with ``axes`` (in mesh order) joined into its last one, over the same groups.

        So storage is split after everything else, and each rank's shard is rows of what it uses. Axis names are joined
        by "_". Where ``axes`` is the mesh's last axis already, it is the mesh itself. base: one of ``unflattened_mesh``
        in place of the runtime's.
        """
        names = names_of(base or self._root)
        if axes == names[-1:]:
            return base or self._root
        others = tuple((name,) for name in names if name not in axes)
        return self._arranged((*others, axes))

    def unflattened_mesh(self, axes: tuple[str, ...], parts: int) -> tuple[DeviceMesh, str, str]:
        """(The mesh with ``axes`` as two, the name of the axis of parts, that of copies), as ``Groups.unflatten``.

        parts: more than one, and fewer than the ranks along ``axes``.
        """
        part, copy = self.groups.unflatten(axes, parts)
        dims: list[tuple[str, ...]] = []
        for name in self.sizes:
            if name not in axes:
                dims.append((name,))
            elif name == self.groups.base_axes(part)[-1]:
                dims += [(part,), (copy,)]
        return self._arranged(tuple(dims)), part, copy

    @property
    def _root(self) -> DeviceMesh:
        mesh = self._mesh()
        assert mesh is not None
        return mesh

    def _arranged(self, dims: tuple[tuple[str, ...], ...]) -> DeviceMesh:
        """The mesh whose dimensions are these axes, each joined; over the groups that there are, as far as can be."""
        if dims not in self._arrangements:
            root, groups = self._root, [self.group(names) for names in dims]
            known = [
                root.get_group(names[0]) if group.process_group is None else group.process_group
                for names, group in zip(dims, groups, strict=True)
            ]
            with unset_fake_temporarily(), trace.quiet():
                ranks = torch.tensor(self.groups.arranged(dims)).reshape([group.size for group in groups])
                self._arrangements[dims] = DeviceMesh.from_group(
                    known if len(known) > 1 else known[0],
                    root.device_type,
                    mesh=ranks,
                    mesh_dim_names=tuple("_".join(names) for names in dims),
                )
        return self._arrangements[dims]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis → ranks along it, in mesh order."""
        return self.groups.sizes


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of its axes."""
    assert mesh.mesh_dim_names is not None
    return tuple(mesh.mesh_dim_names)


_RUNTIMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
