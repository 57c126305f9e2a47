"""Process groups by *which ranks* they join: equal members share one group, whatever axes they were asked for by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from inspect import signature
from itertools import count
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.divergence import LastIssued
from shardwright.comm.library import few, stated_timeout, timeout_of
from shardwright.errors import InputError
from shardwright.spec.mesh import coordinates, nested_chunk, ranks_at, size_along


@dataclass(frozen=True)
class _SubAxis:
    """One of the two axes that ``Groups.unflatten`` makes of ``axes``.

    ``runs`` ranks one after the other hold the same.
    copies: the axis along which ranks hold the same; else the one along which they differ.
    """

    axes: tuple[str, ...]
    runs: int
    size: int
    copies: bool

    def places(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
        """Where the rank at ``place`` of the mesh is (on this axis, on the other of the two)."""
        index = 0
        for axis in self.axes:
            index = index * sizes[axis] + place[axis]
        part, copy = divmod(index, self.runs)
        return (copy, part) if self.copies else (part, copy)


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only along ``axes``, or a part of them (``Groups.unflatten``).

    ranks: global ranks in mesh order; index: this rank's place among them. process_group is None for a group of one,
    which never communicates. backend: the *declared* one (gloo, nccl), by which algorithms are chosen. sizes: ranks
    along each axis; what the group shares is cut by axis after axis, as DTensor cuts it. tags: numbers of the exchanges
    under way, so that the messages of one are never taken for those of another. timeout: how long a wait may take, as
    it was stated; None leaves it to the library. issued: what this rank issued over the group last.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    backend: str
    process_group: dist.ProcessGroup | None
    sizes: tuple[int, ...]
    tags: Iterator[int] = field(default_factory=lambda: count(1), compare=False, repr=False)
    timeout: timedelta | None = field(default=None, compare=False)
    issued: LastIssued = field(default_factory=LastIssued, compare=False, repr=False)

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
        self._issued: dict[tuple[int, ...], LastIssued] = {}
        self._sub_axes: dict[str, _SubAxis] = {}
        self._library = dist.get_backend(mesh.get_group(0))
        self.timeout = stated_timeout(mesh.get_group(0), mesh.device_type)
        for axis in self.sizes:
            ranks = self._members((axis,))
            if dist.get_process_group_ranks(mesh.get_group(axis)) != list(ranks):  # torch sorts the ranks of its groups
                raise InputError(f"mesh: found ranks {few(ranks)} along {axis!r}; allowed: ascending along each axis")
            self._by_ranks.setdefault(ranks, mesh.get_group(axis))
            own = timeout_of(mesh.get_group(axis), mesh.device_type)
            if self.timeout is not None and own not in (None, self.timeout):
                dist.distributed_c10d._set_pg_timeout(self.timeout, mesh.get_group(axis))
        world = dist.group.WORLD
        if world is not None and dist.get_backend(world) == self._library:
            self._by_ranks.setdefault(tuple(range(dist.get_world_size())), world)

    def unflatten(self, axes: Sequence[str], parts: int) -> tuple[str, str]:
        """``axes`` as two, where each rank holds one of ``parts``: (name of the axis of parts, of that of copies).

        The ranks, ``axes`` joined in mesh order, divide by the parts: so many one after the other hold the same. The
        names may be used as those of axes. In a trace, collectives along them are told by ``axes``.
        """
        axes = tuple(axis for axis in self.sizes if axis in axes)
        ranks, joined = size_along(self.sizes, axes), "_".join(axes)
        if ranks % parts:
            raise InputError(f"parts: found {parts}; allowed: a divisor of {'×'.join(axes)} = {ranks}")
        runs, names = ranks // parts, (f"{joined}_parts_{parts}", f"{joined}_copies_{parts}")
        self._sub_axes[names[0]] = _SubAxis(axes, runs, parts, copies=False)
        self._sub_axes[names[1]] = _SubAxis(axes, runs, runs, copies=True)
        return names

    def base_axes(self, name: str) -> tuple[str, ...]:
        """The axes of the mesh that the one of that name is made of: itself, or those that were unflattened."""
        return self._sub_axes[name].axes if name in self._sub_axes else (name,)

    def size_of(self, name: str) -> int:
        """Ranks along one axis, of the mesh or made by ``unflatten``."""
        return self._sub_axes[name].size if name in self._sub_axes else self.sizes[name]

    def _ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """In mesh order; one of ``unflatten`` stands where the last of its axes stands."""
        places = list(self.sizes)
        return tuple(sorted(set(names), key=lambda name: (places.index(self.base_axes(name)[-1]), name)))

    def _members(self, names: Sequence[str]) -> tuple[int, ...]:
        free = {axis for name in names for axis in self.base_axes(name)}
        positions = [*ranks_at(self.place, free, self.sizes)]
        for sub in (self._sub_axes[name] for name in names if name in self._sub_axes):
            _, other = sub.places(self.place, self.sizes)
            positions = [p for p in positions if sub.places(coordinates(p, self.sizes), self.sizes)[1] == other]
        return tuple(self._ranks[position] for position in positions)

    def arranged(self, dims: Sequence[Sequence[str]]) -> list[int]:
        """All ranks in the order of a mesh of these dimensions, each some axes joined; every axis is in one of them."""
        names = [name for axes in dims for name in axes]
        placed: list[tuple[tuple[int, ...], int]] = []
        for position, rank in enumerate(self._ranks):
            place = coordinates(position, self.sizes)
            sub = self._sub_axes
            here = [sub[name].places(place, self.sizes)[0] if name in sub else place[name] for name in names]
            placed.append((tuple(here), rank))
        return [rank for _, rank in sorted(placed)]

    def members(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one only along ``axes``, in mesh order; no group is made."""
        return self._members(axes)

    def along(self, axes: Sequence[str]) -> AxisGroup:
        """The group over ``axes`` (in any order; members come in mesh order). Raises InputError for an unknown axis."""
        for axis in axes:
            if axis not in self.sizes and axis not in self._sub_axes:
                raise InputError(f"layout: found axis {axis!r}; allowed: the mesh's axes ({', '.join(self.sizes)})")
        key = self._ordered(axes)
        group = self._by_axes.get(key)
        if group is None:
            ranks = self._members(key)
            process_group = None
            if len(ranks) > 1:
                process_group = self._by_ranks.get(ranks)
                if process_group is None:
                    process_group = self._by_ranks[ranks] = self._new(ranks)
            index = ranks.index(dist.get_rank())
            tags = self._tags.setdefault(ranks, count(1))
            issued = self._issued.get(ranks) or LastIssued(ranks, self._issued)
            along = tuple(self.size_of(name) for name in key)
            told = self._ordered([axis for name in key for axis in self.base_axes(name)])
            group = self._by_axes[key] = AxisGroup(
                told, ranks, index, self.backend, process_group, along, tags, self.timeout, issued
            )
        return group

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group of the mesh's own library whose members are numbered as they come in the mesh."""
        options: dict[str, Any] = {"backend": self._library, "timeout": self.timeout}
        if list(ranks) != sorted(ranks):
            if "sort_ranks" not in signature(dist.new_group).parameters:
                raise InputError(f"mesh: found ranks {few(ranks)}; allowed on this torch: ascending ranks")
            options["sort_ranks"] = False
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True, **options))
