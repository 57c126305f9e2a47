"""Process groups by *which ranks* they join: equal members share one group, whatever axes they were asked for by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright._errors import InputError
from shardwright.mesh import nested_chunk


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only along ``axes``.

    ranks: global ranks in mesh order; index: this rank's place among them. process_group is None for a group of one,
    which never communicates. backend: the *declared* one (gloo, nccl), by which algorithms are chosen. sizes: ranks
    along each axis; what the group shares is cut by axis after axis, as DTensor cuts it. tags: numbers of the exchanges
    under way, so that the messages of one are never taken for those of another.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    backend: str
    process_group: dist.ProcessGroup | None
    sizes: tuple[int, ...]
    tags: Iterator[int] = field(default_factory=lambda: count(1), compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def bounds(self, length: int, index: int | None = None) -> tuple[int, int]:
        """[start, stop) of the part of ``length`` that belongs to member ``index`` (by default this rank)."""
        return nested_chunk(length, self.sizes, self.index if index is None else index)

    def lengths(self, length: int) -> list[int]:
        """How much of ``length`` belongs to each member."""
        bounds = (self.bounds(length, index) for index in range(self.size))
        return [stop - start for start, stop in bounds]

    def joined(self) -> AxisGroup:
        """The same ranks as one axis: what they share is cut once, into ⌈length/size⌉ each."""
        return replace(self, sizes=(self.size,))


class Groups:
    """Every group of one mesh, made on first use, in program order (which is the same on every rank)."""

    def __init__(self, mesh: DeviceMesh, backend: str):
        if mesh.mesh_dim_names is None:
            raise InputError("mesh: found no axis names; allowed: a DeviceMesh with mesh_dim_names")
        self.sizes: Mapping[str, int] = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        self.backend = backend
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        place = mesh.get_coordinate()
        if place is None:
            raise InputError(f"mesh: found no place for rank {dist.get_rank()}; allowed: the mesh's ranks")
        self.place: Mapping[str, int] = dict(zip(self.sizes, place, strict=True))
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._by_axes: dict[tuple[str, ...], AxisGroup] = {}
        self._tags: dict[tuple[int, ...], Iterator[int]] = {}
        for axis in self.sizes:
            self._by_ranks.setdefault(self._members((axis,)), mesh.get_group(axis))
        if dist.group.WORLD is not None:
            self._by_ranks.setdefault(tuple(range(dist.get_world_size())), dist.group.WORLD)

    def _members(self, axes: Sequence[str]) -> tuple[int, ...]:
        positions = [0]
        for axis, size in self.sizes.items():
            here = range(size) if axis in axes else (self.place[axis],)
            positions = [position * size + i for position in positions for i in here]
        return tuple(self._ranks[position] for position in positions)

    def along(self, axes: Sequence[str]) -> AxisGroup:
        """The group over ``axes`` (in any order; members come in mesh order). Raises InputError for an unknown axis."""
        for axis in axes:
            if axis not in self.sizes:
                raise InputError(f"layout: found axis {axis!r}; allowed: the mesh's axes ({', '.join(self.sizes)})")
        key = tuple(axis for axis in self.sizes if axis in axes)
        group = self._by_axes.get(key)
        if group is None:
            ranks = self._members(key)
            process_group = None
            if len(ranks) > 1:
                process_group = self._by_ranks.get(ranks)
                if process_group is None:
                    process_group = dist.new_group(list(ranks), use_local_synchronization=True)
                    self._by_ranks[ranks] = process_group
            index = ranks.index(dist.get_rank())
            tags = self._tags.setdefault(ranks, count(1))
            along = tuple(self.sizes[axis] for axis in key)
            group = self._by_axes[key] = AxisGroup(key, ranks, index, self.backend, process_group, along, tags)
        return group
