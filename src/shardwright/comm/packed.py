"""Collectives of several small tensors over one group, each as one message a rank: they are packed into one buffer.

Beside together.py: what is small travels packed (a message costs more than a copy), what is large from its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.arena import Arena
from shardwright.comm.collectives import Reducing
from shardwright.comm.exchange import places, receive, send
from shardwright.comm.groups import AxisGroup
from shardwright.comm.together import Logged

Pair = tuple[torch.Tensor, torch.Tensor]


class GatheringPacked:
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
        self.group, self.module, self.mode = group, module, mode
        n, me = group.size, group.index
        by_pair = [places(whole, group) for _, whole in pairs]
        self._places = [[of_pair[rank] for of_pair in by_pair] for rank in range(n)]
        for (part, whole), place in zip(pairs, self._places[me], strict=True):
            if part.shape != place.shape:
                raise ValueError(
                    f"{module or 'all_gather'}: found a part of shape {tuple(part.shape)}; allowed: "
                    f"{tuple(place.shape)}, this rank's part of {tuple(whole.shape)} over {n} ranks"
                )
        self._sizes = [[place.numel() for place in of_rank] for of_rank in self._places]
        totals = [sum(sizes) for sizes in self._sizes]
        lanes = [totals[0]] * n if group.backend == "nccl" else totals
        self._arena = arena
        self._buffer = _room(sum(lanes), pairs[0][1], arena, module)
        self._lanes = [lane[:total] for lane, total in zip(self._buffer.split(lanes), totals, strict=True)]
        torch._foreach_copy_(self._parts(me), [part.reshape(-1) for part, _ in pairs])
        torch._foreach_copy_(self._places[me], [part for part, _ in pairs])
        if group.backend == "nccl":
            mine = self._buffer.split(lanes)[me]
            work = dist.all_gather_into_tensor(self._buffer, mine, group=group.process_group, async_op=True)
            self._works = [cast(dist.Work, work)]
            return
        tag = next(group.tags)
        peers = [(me + step) % n for step in range(1, n)]
        self._works = [receive(self._lanes[peer], peer, group, tag) for peer in reversed(peers) if totals[peer]]
        self._works += [send(self._lanes[me], peer, group, tag) for peer in peers if totals[me]]

    def _parts(self, rank: int) -> list[torch.Tensor]:
        return list(self._lanes[rank].split(self._sizes[rank]))

    def finish(self) -> None:
        """Until everything is in its place, and everything sent."""
        if not self._places:
            return
        if self.mode != "blocking":
            trace.waited("all_gather", self.group.axes, self.module)
        while self._works:
            self._works.pop(0).wait()
        for rank, of_rank in enumerate(self._places):
            if rank != self.group.index:
                torch._foreach_copy_([place.view(-1) for place in of_rank], self._parts(rank))
        self._places, self._lanes = [], []
        _give_back(self, self._arena)


class ReducingPacked:
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
        with trace.unlogged():
            self._reducing = Reducing(self._buffer, group, module, "blocking")

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


def _give_back(handle: GatheringPacked | ReducingPacked, arena: Arena | None) -> None:
    if arena is not None:
        arena.end(handle._buffer)
    del handle._buffer
