"""Collectives of several small tensors over one group, each as one message a rank: they are packed into one buffer.

Beside coalesced.py: what is small travels packed (a message costs more than a copy), what is large from its own place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwright import trace
from shardwright.comm.coalesced import Logged
from shardwright.comm.collectives import AllReduceHandle
from shardwright.comm.exchange import gather_into, part_of_one, places, receive, send, tag_of
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work
from shardwright.runtime.arena import Arena

Pair = tuple[torch.Tensor, torch.Tensor]


class PackedAllGatherHandle:
    """whole_i[R_i] ← the parts of every rank, for each pair (part_i, whole_i), under way; ``finish()`` waits.

    The group has at least two ranks. Wholes are contiguous, and of one element type, in which the parts travel; the
    parts may have others. Scratch, until it has finished: the bytes of all wholes (on NCCL N times what the first rank
    holds), leased from ``arena`` if one is given. logged: the operation of the trace that it joins, by default its own.
    Raises ValueError where element types or shapes do not fit.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        group: AxisGroup,
        module: str,
        mode: str,
        arena: Arena | None = None,
        logged: Logged | None = None,
    ):
        _of_one_type([whole for _, whole in pairs], module)
        own = sum(part.numel() * whole.element_size() for part, whole in pairs)
        whole_bytes = sum(whole.nbytes for _, whole in pairs)
        (logged or Logged()).join("all_gather", group, whole_bytes, own, module, mode)
        self._number = group.issued.count - 1
        self.group, self.module, self.mode = group, module, mode
        for part, whole in pairs:
            start, stop = group.bounds(whole.shape[0])
            if part.shape != (stop - start, *whole.shape[1:]):
                raise ValueError(
                    f"{module or 'all_gather'}: found a part of shape {tuple(part.shape)}; allowed: "
                    f"{(stop - start, *whole.shape[1:])}, this rank's part of {tuple(whole.shape)} over {group.size} "
                    "ranks"
                )
        self._arena = arena
        self._wholes = [whole for _, whole in pairs]
        parts = [part for part, _ in pairs]
        if group.backend == "nccl":
            self._on_nccl(parts)
        else:
            self._by_exchange(parts)

    def _by_exchange(self, parts: list[torch.Tensor]) -> None:
        """Every rank's parts are a lane of the buffer, as long as they are."""
        group, n, me = self.group, self.group.size, self.group.index
        by_whole = [places(whole, group) for whole in self._wholes]
        self._places = [[of_whole[rank] for of_whole in by_whole] for rank in range(n)]
        self._sizes = [[place.numel() for place in of_rank] for of_rank in self._places]
        totals = [sum(sizes) for sizes in self._sizes]
        self._buffer = _room(sum(totals), self._wholes[0], self._arena, self.module)
        self._lanes = list(self._buffer.split(totals))
        torch._foreach_copy_(self._parts(me), [part.reshape(-1) for part in parts])
        torch._foreach_copy_(self._places[me], parts)
        tag = tag_of("all_gather", group, self._buffer.nbytes, self.module)
        peers = [(me + step) % n for step in range(1, n)]
        self._works = [receive(self._lanes[peer], peer, group, tag) for peer in reversed(peers) if totals[peer]]
        self._works += [send(self._lanes[me], peer, group, tag) for peer in peers if totals[me]]

    def _on_nccl(self, parts: list[torch.Tensor]) -> None:
        """Lanes are equally long, with room for the first rank's part of every whole; one collective brings them."""
        group = self.group
        firsts = [math.prod((group.bounds(whole.shape[0], 0)[1], *whole.shape[1:])) for whole in self._wholes]
        self._buffer = _room(group.size * sum(firsts), self._wholes[0], self._arena, self.module)
        lanes = self._buffer.view(group.size, -1)
        self._slots = list(lanes.split(firsts, 1))
        mine = lanes[group.index]
        rooms = [room[: part.numel()] for room, part in zip(mine.split(firsts), parts, strict=True)]
        torch._foreach_copy_(rooms, [part.reshape(-1) for part in parts])
        self._works = [gather_into(self._buffer, mine, group)]

    def _parts(self, rank: int) -> list[torch.Tensor]:
        return list(self._lanes[rank].split(self._sizes[rank]))

    def finish(self) -> None:
        """Until everything is in its place, and everything sent."""
        if not self._wholes:
            return
        if self.mode != "blocking":
            trace.waited("all_gather", self.group.axes, self.module)
        while self._works:
            await_work(self._works.pop(0), self.group, self._number)
        if self.group.backend == "nccl":
            for slot, whole in zip(self._slots, self._wholes, strict=True):
                _unpack(slot, whole, self.group)
            self._slots = []
        else:
            for rank, of_rank in enumerate(self._places):
                if rank != self.group.index:
                    torch._foreach_copy_([place.view(-1) for place in of_rank], self._parts(rank))
            self._places, self._lanes = [], []
        self._wholes = []
        _give_back(self, self._arena)


def _unpack(slot: torch.Tensor, whole: torch.Tensor, group: AxisGroup) -> None:
    """whole [R,…] ← slot [n,·], of which row r begins with rank r's part: as long as the first one's, but for the last.

    Of several axes that cut one after the other, and do not divide, each rank's part is copied for itself.
    """
    rows = group.bounds(whole.shape[0], 0)[1]
    if group.sizes != (group.size,) and whole.shape[0] % group.size:
        for place, part in zip(places(whole, group), slot.unbind(0), strict=True):
            place.view(-1).copy_(part[: place.numel()])
        return
    full, rest = divmod(whole.shape[0], rows) if rows else (0, 0)
    if full:
        whole[: full * rows].view(full, -1).copy_(slot[:full])
    if rest:
        last = whole[full * rows :].view(-1)
        last.copy_(slot[full, : last.numel()])


class PackedAllReduceHandle:
    """tensor_i ← its sum over ranks, in place, for each tensor, under way; ``finish()`` waits.

    The group has at least two ranks. Tensors are of one element type. wide: sums in low precision are taken, and
    travel, in fp32. Scratch, until it has finished: the bytes that travel, leased from ``arena`` if one is given.
    logged: the operation of the trace that it joins, by default its own.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: AxisGroup,
        module: str,
        mode: str,
        wide: bool = False,
        logged: Logged | None = None,
        arena: Arena | None = None,
    ):
        _of_one_type(tensors, module)
        self.group, self.module, self.mode = group, module, mode
        self._tensors, self._arena = list(tensors), arena
        low = tensors[0].dtype in (torch.bfloat16, torch.float16)
        like = tensors[0].new_empty(0, dtype=torch.float32) if wide and low else tensors[0]
        self._buffer = _room(sum(tensor.numel() for tensor in tensors), like, arena, module)
        (logged or Logged()).join("all_reduce", group, self._buffer.nbytes, self._buffer.nbytes, module, mode)
        torch._foreach_copy_(self._parts(), self._tensors)
        with part_of_one(group):
            self._reducing = AllReduceHandle(self._buffer, group, module, "blocking")

    def _parts(self) -> list[torch.Tensor]:
        parts = self._buffer.split([tensor.numel() for tensor in self._tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def advance(self) -> None:
        """Nothing to do: the library's all-reduce runs by itself."""

    def finish(self) -> None:
        """Until the sums are there."""
        if not self._tensors:
            return
        if self.mode != "blocking":
            trace.waited("all_reduce", self.group.axes, self.module)
        with trace.unlogged():
            self._reducing.finish()
        torch._foreach_copy_(self._tensors, self._parts())
        self._tensors = []
        del self._reducing
        _give_back(self, self._arena)


def _of_one_type(tensors: Sequence[torch.Tensor], module: str) -> None:
    types = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors))
    if len(types) != 1:
        raise ValueError(
            f"{module or 'packed'}: found {' and '.join(types) or 'no tensors'}; allowed: one element type"
        )


def _room(length: int, like: torch.Tensor, arena: Arena | None, module: str) -> torch.Tensor:
    if arena is None:
        return torch.empty(length, dtype=like.dtype, device=like.device)
    return arena.lease((length,), like.dtype, like.device, "gathered", f"{module} (packed)")


def _give_back(handle: PackedAllGatherHandle | PackedAllReduceHandle, arena: Arena | None) -> None:
    if arena is not None:
        arena.end(handle._buffer)
    del handle._buffer
