"""How a full bin is reduced: exchanged lane by lane on gloo, by the library on NCCL, or all-reduced.

Arrivals are added straight into the destinations, so no result buffer exists.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.collectives import AllReduceHandle
from shardwright.comm.exchange import log, receive, scatter_from, send, tag_of
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work
from shardwright.runtime.arena import Arena
from shardwright.runtime.bin import Bin

MODULE = "bucket"
"""The module that a bin's collectives and leases bear in a trace."""


class BinReduction(Protocol):
    """A bin under way."""

    def advance(self) -> None:
        """Takes in one more arrival, where another is to follow in its place."""

    def finish(self, keep: bool) -> None:
        """Until nothing travels any more, and all memory is given back. keep: the sums are in the destinations."""


class BinExchange:
    """A bin whose lanes are sent to their ranks; the shares of the others come in ring order, the own one is last.

    So each sum is bit for bit that of ``exchange.Scattering``. But where sums have another element type than their
    destinations, they form in a lane of that type: the own share comes first then, and others arrive in its place.
    """

    def __init__(self, full: Bin, group: AxisGroup, arena: Arena):
        lanes = full.lanes
        log("reduce_scatter", group, lanes.nbytes, lanes[0].nbytes, MODULE, "async")
        self._bin, self._group, self._arena = full, group, arena
        n, me = group.size, group.index
        self._own = lanes[me]
        self._leases = [full.buffer]
        self._sums: torch.Tensor | None = None
        if full.total is None:
            shape = (min(2, n - 1), full.used)
            self._leases.append(arena.lease(shape, lanes.dtype, lanes.device, "bucket", f"{MODULE} (arrivals)"))
            slots = list(self._leases[1].unbind(0))
        else:
            self._sums = arena.lease((full.used,), full.total, lanes.device, "bucket", f"{MODULE} (sums)")
            self._leases.append(self._sums.copy_(self._own))
            slots = [self._own]
        self._number = group.issued.count - 1
        self._tag = tag_of("reduce_scatter", group, lanes.nbytes, MODULE)
        self._sources = [(me + step) % n for step in range(1, n)]
        self._arrivals: list[tuple[dist.Work, torch.Tensor]] = []
        for slot in slots:
            self._await(slot)
        peers = [(me - step) % n for step in range(1, n)]
        self._sends = [send(lanes[peer], peer, group, self._tag) for peer in peers]

    def _await(self, slot: torch.Tensor) -> None:
        if self._sources:
            work = receive(slot, self._sources.pop(0), self._group, self._tag)
            self._arrivals.append((work, slot))

    def _take(self, lane: torch.Tensor) -> None:
        if self._sums is None:
            self._bin.land(lane)
        else:
            self._sums.add_(lane)

    def advance(self) -> None:
        if self._sources:
            self._advance(keep=True)

    def _advance(self, keep: bool) -> None:
        if not self._arrivals:
            return
        trace.waited("reduce_scatter", self._group.axes, MODULE)
        arrival, slot = self._arrivals.pop(0)
        await_work(arrival, self._group, self._number)
        del arrival  # gloo's handles hold their tensors: let go of them in a fixed order
        if keep:
            self._take(slot)
        self._await(slot)

    def finish(self, keep: bool) -> None:
        while self._arrivals:
            self._advance(keep)
        if keep:
            self._bin.land(self._own if self._sums is None else self._sums)
        for sent in self._sends:
            await_work(sent, self._group, self._number)
        self._sends = []
        for lease in self._leases:
            self._arena.end(lease)


class BinOnNccl:
    """A bin reduced by NCCL, in its own buffer: this rank's lane becomes the sum. It travels with its unused end."""

    def __init__(self, full: Bin, group: AxisGroup, arena: Arena):
        log("reduce_scatter", group, full.buffer.nbytes, full.buffer[0].nbytes, MODULE, "async")
        self._bin, self._group, self._arena = full, group, arena
        self._own = full.buffer[group.index]
        self._number = group.issued.count - 1
        self._work = scatter_from(self._own, full.buffer.view(-1), group)

    def advance(self) -> None:
        """Nothing to do: the library's collective runs by itself."""

    def finish(self, keep: bool) -> None:
        trace.waited("reduce_scatter", self._group.axes, MODULE)
        await_work(self._work, self._group, self._number)
        if keep:
            self._bin.land(self._own[: self._bin.used])
        self._arena.end(self._bin.buffer)


class BinAllReduce:
    """A bin of one lane, summed in place."""

    def __init__(self, full: Bin, group: AxisGroup, arena: Arena):
        self._bin, self._arena = full, arena
        self._lane = full.lanes[0]
        self._reducing = AllReduceHandle(self._lane, group, MODULE, "async")

    def advance(self) -> None:
        """Nothing to do: the library's all-reduce runs by itself."""

    def finish(self, keep: bool) -> None:
        self._reducing.finish()
        if keep:
            self._bin.land(self._lane)
        self._arena.end(self._bin.buffer)


def reduction_of(full: Bin, group: AxisGroup, arena: Arena) -> BinReduction:
    """``full`` travels now, in the way of its kind and of the group's backend."""
    if full.kind == "all_reduce":
        return BinAllReduce(full, group, arena)
    return BinOnNccl(full, group, arena) if group.backend == "nccl" else BinExchange(full, group, arena)
