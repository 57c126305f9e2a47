"""Bins: small gradients of one element type and one set of ranks share a buffer, and are reduced as one.

One bin fills while at most one travels; a bin is half a cap. A gradient [rows, …] is cut as storage is, ⌈rows/N⌉ rows
a rank: lane r of the buffer [N, length] holds what rank r will own, one gradient after the other, padded to equal
lengths. So a lane is what travels to one rank, in one message. An all-reduced bin has one lane.

| when                               | memory, of a cap                                                   |
|------------------------------------|--------------------------------------------------------------------|
| a gradient opens a bin             | ½                                                                  |
| it is full, or the next has no room| it travels: + 1/(2N) for each arrival awaited, of which there are 2|
| the next one fills meanwhile       | + ½                                                                |
| flushed                            | 0                                                                  |

Arrivals are added straight into the destinations, so no result buffer exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.collectives import AllReduceHandle
from shardwright.comm.exchange import log, receive, scatter_from, send, tag_of
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work
from shardwright.errors import InputError
from shardwright.runtime.arena import Arena
from shardwright.spec.mesh import chunk

MODULE = "bucket"
"""The module that a bin's collectives and leases bear in a trace."""


def lane_length(shape: Sequence[int], lanes: int) -> int:
    """Elements that a gradient of ``shape`` takes in each of ``lanes`` lanes."""
    rows, *width = shape or (1,)
    return -(-rows // lanes) * math.prod(width)


@dataclass(frozen=True)
class _Piece:
    """One gradient in a bin: ``length`` elements of every lane, of which this rank's are the first ``own``.

    destination: flat, [own]. landed: told when the sum is there.
    """

    length: int
    destination: torch.Tensor
    landed: Callable[[], None] | None

    @property
    def own(self) -> int:
        return self.destination.numel()


@dataclass
class _Bin:
    """A buffer [lanes, length] that fills from the left.

    total: the element type of its sums, where destinations have another; None where sums form in the destinations.
    """

    kind: str
    total: torch.dtype | None
    buffer: torch.Tensor
    pieces: list[_Piece] = field(default_factory=list)
    used: int = 0

    @property
    def length(self) -> int:
        return self.buffer.shape[1]

    def admits(self, kind: str, total: torch.dtype | None, length: int) -> bool:
        """Whether a gradient that is reduced in this way has room."""
        return (kind, total) == (self.kind, self.total) and self.used + length <= self.length

    @property
    def lanes(self) -> torch.Tensor:
        """What is filled: [lanes, used]."""
        return self.buffer[:, : self.used]

    def take(self, gradient: torch.Tensor, piece: _Piece) -> None:
        """Copies the gradient behind what is there, each rank's rows into its lane."""
        place = self.buffer[:, self.used : self.used + piece.length]
        self.pieces.append(piece)
        self.used += piece.length
        rows, *width = gradient.shape
        each = -(-rows // place.shape[0])
        whole = rows // each  # lanes that get their full share; one more may get less, and the others nothing
        place = place.unflatten(1, (each, *width))
        place[:whole].copy_(gradient[: whole * each].unflatten(0, (whole, each)))
        if rows % each:
            place[whole, : rows % each].copy_(gradient[whole * each :])

    def land(self, lane: torch.Tensor) -> None:
        """Adds this rank's elements of a lane [used] to the destinations."""
        sizes = [size for piece in self.pieces for size in (piece.own, piece.length - piece.own)]
        targets, parts = [piece.destination for piece in self.pieces], lane.split(sizes)[::2]
        if self.apart:
            torch._foreach_add_(targets, parts)
        else:  # one call would add several parts to one destination at once
            for target, part in zip(targets, parts, strict=True):
                target.add_(part)

    @property
    def apart(self) -> bool:
        """Whether no two gradients have one destination."""
        places = {(id(each.destination.untyped_storage()), each.destination.storage_offset()) for each in self.pieces}
        return len(places) == len(self.pieces)


class _Travelling(Protocol):
    """A bin under way."""

    def advance(self) -> None:
        """Takes in one more arrival, where another is to follow in its place."""

    def finish(self, keep: bool) -> None:
        """Until nothing travels any more, and all memory is given back. keep: the sums are in the destinations."""


class _Exchange:
    """A bin whose lanes are sent to their ranks; the shares of the others come in ring order, the own one is last.

    So each sum is bit for bit that of ``exchange.Scattering``. But where sums have another element type than their
    destinations, they form in a lane of that type: the own share comes first then, and others arrive in its place.
    """

    def __init__(self, full: _Bin, group: AxisGroup, arena: Arena):
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


class _OnNccl:
    """A bin reduced by NCCL, in its own buffer: this rank's lane becomes the sum. It travels with its unused end."""

    def __init__(self, full: _Bin, group: AxisGroup, arena: Arena):
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


class _AllReduce:
    """A bin of one lane, summed in place."""

    def __init__(self, full: _Bin, group: AxisGroup, arena: Arena):
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


class Bins:
    """The bins of one (ranks, element type, device): see Runtime.bucket. They hold no memory between flushes.

    Every rank of the group must add the same gradients in the same order, and flush where the others do.
    """

    def __init__(self, group: AxisGroup, dtype: torch.dtype, device: torch.device, arena: Arena):
        self.group, self.dtype, self.device = group, dtype, device
        self._arena = arena
        self._filling: _Bin | None = None
        self._travelling: tuple[_Bin, _Travelling] | None = None
        self._expected = 0

    @property
    def busy(self) -> bool:
        """Whether something was added and is not reduced yet."""
        return self._filling is not None or self._travelling is not None

    def lanes(self, kind: str) -> int:
        """Into how many parts a gradient is cut."""
        return self.group.size if kind == "reduce_scatter" else 1

    def padded_bytes(self, shape: Sequence[int], kind: str) -> int:
        """Bytes that a gradient of ``shape`` takes in a bin."""
        lanes = self.lanes(kind)
        return lanes * lane_length(shape, lanes) * self.dtype.itemsize

    def room(self, cap: int, kind: str) -> int:
        """Bytes of gradients that a bin of half a cap has room for."""
        row = self.lanes(kind) * self.dtype.itemsize
        return cap // 2 // row * row

    def expect(self, padded: int) -> None:
        """So many padded bytes more will come before the next flush: no bin is larger than what is still to come.

        Without it every bin is half a cap. What comes beyond what was expected opens bins of its own size.
        """
        self._expected += padded

    @torch.no_grad()
    def add(
        self,
        gradient: torch.Tensor,
        destination: torch.Tensor,
        cap: int,
        kind: str = "reduce_scatter",
        total: torch.dtype | None = None,
        landed: Callable[[], None] | None = None,
    ) -> None:
        """Copies ``gradient`` [rows, …] into a bin; when that has travelled its sum is added to ``destination``.

        destination: contiguous; this rank's ⌈rows/N⌉ rows (all rows, for kind ``all_reduce``), zero or an earlier sum.
        For kind ``all_reduce`` it may be the gradient itself, which becomes the sum.
        cap: bytes; a bin that this gradient opens is half of it. total: the element type of the sum, by default the
        destination's. landed: called when the sum is there.

        Raises InputError where the destination has another shape or gaps, where the gradient is larger than a bin, and
        where ``total`` is more than twice as wide as what travels.
        """
        lanes, wide = self.lanes(kind), total if total != destination.dtype else None
        length = lane_length(gradient.shape, lanes)
        self._check(gradient, destination, cap, kind, wide)
        if self.group.size == 1 and destination is not gradient:
            destination.add_(gradient)
        if self.group.size == 1 or not length:
            if landed is not None:
                landed()
            return
        while self._filling is not None and not self._filling.admits(kind, wide, length):
            self._launch()
        padded = self.padded_bytes(gradient.shape, kind)
        filling = self._filling or self._open(padded, cap, kind, wide)
        self._expected = max(0, self._expected - padded)
        piece = _Piece(length, destination.detach().view(-1), landed)
        filling.take(gradient if gradient.dim() else gradient.view(1), piece)
        if destination is gradient:
            destination.zero_()
        if filling.used == filling.length:
            self._launch()

    def _check(
        self, gradient: torch.Tensor, destination: torch.Tensor, cap: int, kind: str, wide: torch.dtype | None
    ) -> None:
        shape = tuple(gradient.shape)
        if kind == "reduce_scatter":
            if not shape:
                raise InputError("gradient: found a scalar; allowed: one with rows, or kind all_reduce")
            start, stop = chunk(shape[0], self.group.size, self.group.index)
            shape = (stop - start, *shape[1:])
        if tuple(destination.shape) != shape or not destination.is_contiguous():
            gaps = "" if destination.is_contiguous() else " with gaps"
            raise InputError(
                f"destination: found shape {tuple(destination.shape)}{gaps}; allowed: {shape} without gaps, this "
                f"rank's part of a gradient of shape {tuple(gradient.shape)}"
            )
        if self.padded_bytes(gradient.shape, kind) > cap // 2:
            raise InputError(
                f"gradient: found {self.padded_bytes(gradient.shape, kind)} B, padded; allowed: {cap // 2} B, half of "
                "the cap"
            )
        if wide is not None and wide.itemsize > 2 * self.dtype.itemsize:
            raise InputError(
                f"reduce_dtype: found {wide} for gradients that travel as {self.dtype}; allowed: at most twice as "
                "wide, or destinations of that type"
            )

    def _open(self, padded: int, cap: int, kind: str, total: torch.dtype | None) -> _Bin:
        room = self.room(cap, kind)
        size = min(room, max(padded, self._expected)) if self._expected else room
        lanes = self.lanes(kind)
        shape = (lanes, size // (lanes * self.dtype.itemsize))
        self._filling = _Bin(kind, total, self._arena.lease(shape, self.dtype, self.device, "bucket", MODULE))
        return self._filling

    @torch.no_grad()
    def send(self) -> None:
        """What was added travels now, though the bin is not full."""
        if self._filling is not None:
            self._launch()

    def _launch(self) -> None:
        """What fills travels; what travelled before has landed then."""
        full, self._filling = self._filling, None
        while self._travelling is not None:  # a ``landed`` call may have added more, and that may travel
            self._land(keep=True)
        if full is not None:
            handle: type[_Exchange] | type[_OnNccl] | type[_AllReduce] = _AllReduce
            if full.kind == "reduce_scatter":
                handle = _OnNccl if self.group.backend == "nccl" else _Exchange
            self._travelling = full, handle(full, self.group, self._arena)

    def _land(self, keep: bool) -> None:
        if self._travelling is None:
            return
        full, handle = self._travelling
        self._travelling = None
        handle.finish(keep)
        for piece in full.pieces:
            if keep and piece.landed is not None:
                piece.landed()

    @torch.no_grad()
    def advance(self) -> None:
        """Takes in what is next to arrive, and lets what follows travel."""
        if self._travelling is not None:
            self._travelling[1].advance()

    @torch.no_grad()
    def flush(self) -> None:
        """Until every sum is in its destination. All memory is given back."""
        while self.busy:
            self._launch()
        self._expected = 0

    @torch.no_grad()
    def abandon(self) -> None:
        """Drops everything; what travels is let through, for the other ranks.

        Destinations of what had not landed hold parts of sums, or nothing.
        """
        self._land(keep=False)
        if self._filling is not None:
            self._arena.end(self._filling.buffer)
        self._filling, self._expected = None, 0
