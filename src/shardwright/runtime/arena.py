"""The arena: gathered operands, unreduced results and buckets are leased; the plan states how many may live at once.

A slot is a permission, not a place: a lease allocates, a release gives the memory back to torch's allocator. The leases
of one dtype, sorted by size, must fit under the slots, sorted by size, one by one.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright import trace


class ArenaError(RuntimeError):
    """More leased at once than the plan states; the message names the module that asked."""


@dataclass(frozen=True)
class _Lease:
    owner: str
    dtype: str
    size: int
    reference: Any


class Arena:
    """Leases of one runtime.

    slots: dtype name → slot sizes in bytes, largest first; None is unlimited. poison: test mode, in which memory is
    filled with NaN on lease and again on release instead of being freed, so that a reader too early or too late shows.
    """

    def __init__(self, slots: Mapping[str, Sequence[int]] | None = None, poison: bool = False):
        self.slots = slots
        self.poison = poison
        self._leases: dict[int, _Lease] = {}
        self._sizes: dict[str, list[int]] = {}  # of the leases of each dtype, smallest first
        self._most: dict[str, list[int]] = {}

    def lease(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, category: str, owner: str
    ) -> torch.Tensor:
        """An uninitialised tensor of category ``gathered``, ``unreduced`` or ``bucket``, until ``end`` or ``give``.

        A tensor that nobody holds any more ends its lease by itself. Raises ArenaError above the stated slots.
        """
        name = str(dtype).removeprefix("torch.")
        size = dtype.itemsize
        for length in shape:
            size *= length
        self._admit(name, size, owner)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        trace.note(tensor, category)
        self._enter(tensor, name, size, owner)
        return tensor

    def renew(self, tensor: torch.Tensor, category: str, owner: str) -> None:
        """Leases memory anew for a tensor whose lease was ended, in the storage that its aliases share."""
        name, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        self._admit(name, size, owner)
        tensor.untyped_storage().resize_(size)
        trace.renewed(tensor, category)
        self._enter(tensor, name, size, owner)

    def _enter(self, tensor: torch.Tensor, dtype: str, size: int, owner: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        self._leave(key)
        reference = weakref.ref(storage, lambda gone: self._forget(key, gone))
        self._leases[key] = _Lease(owner, dtype, size, reference)
        bisect.insort(self._sizes.setdefault(dtype, []), size)
        if self.poison:
            self._spoil(tensor)

    def _admit(self, dtype: str, size: int, owner: str) -> None:
        held = self._sizes.get(dtype, [])
        larger = len(held) - bisect.bisect_left(held, size)
        if self.slots is not None:
            sizes = sorted([size, *held], reverse=True)
            stated = sorted(self.slots.get(dtype, ()), reverse=True)
            if len(sizes) > len(stated) or any(a > b for a, b in zip(sizes, stated, strict=False)):
                holders = ", ".join(f"{lease.owner} {lease.size} B" for lease in self._leases.values())
                raise ArenaError(
                    f"{owner} asks for {size} B of {dtype} beside ({holders or 'nothing'}); the plan states slots of "
                    f"{stated} B. Raise arena.{dtype} in the plan, or set arena: null"
                )
        most = self._most.setdefault(dtype, [])
        most += [0] * (1 + len(held) - len(most))
        below = held[: len(held) - larger]
        for place, each in enumerate([size, *reversed(below)], larger):  # the larger ones keep their places
            most[place] = max(most[place], each)

    def _forget(self, key: int, gone: Any) -> None:
        lease = self._leases.get(key)
        if lease is not None and lease.reference is gone:
            self._leave(key)

    def _leave(self, key: int) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            sizes = self._sizes[lease.dtype]
            del sizes[bisect.bisect_left(sizes, lease.size)]

    def end(self, tensor: torch.Tensor) -> None:
        """Releases the tensor's memory now, if it is leased here; any other tensor is left alone."""
        key = id(tensor.untyped_storage())
        if key not in self._leases:
            return
        self._leave(key)
        trace.released(tensor)
        if self.poison:
            self._spoil(tensor)
        else:
            tensor.untyped_storage().resize_(0)

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor now belongs to who holds it (the autograd graph, say); its lease is over, its memory stays."""
        self._leave(id(tensor.untyped_storage()))
        return tensor

    def _spoil(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            with trace.quiet(), torch.no_grad():
                tensor.data.fill_(float("nan"))

    @property
    def held(self) -> int:
        """Bytes leased now."""
        return sum(lease.size for lease in self._leases.values())

    @property
    def most(self) -> dict[str, list[int]]:
        """The slots that everything leased so far would have needed: dtype name → sizes in bytes, largest first."""
        return {dtype: list(sizes) for dtype, sizes in sorted(self._most.items())}
