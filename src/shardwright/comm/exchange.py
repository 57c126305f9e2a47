"""Gathers and reduce-scatters that are under way: issued now, waited for piece by piece, products in between.

Parts lie along dimension 0, in rank order: over n ranks a whole of R rows has parts of ⌈R/n⌉ rows; where R does not
divide, the last parts are shorter or empty (several axes cut one after the other: ``AxisGroup.bounds``). On gloo both
are *direct exchanges*: every rank sends to, and receives from, each other rank without a copy on the sending side
(gloo's own reduce-scatter is an all-reduce, and its all-gather hides a buffer of the full size). On NCCL they are its
collectives, on its own stream.

No tensor that a handle holds may be released before the handle has finished.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.divergence import Issued
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work, explained
from shardwright.spec.collectives import sent_bytes


def log(
    kind: str, group: AxisGroup, whole_bytes: int, own_bytes: int, module: str, mode: str, last_bytes: int | None = None
) -> Callable[[int, int], None]:
    """Writes one logical collective into the trace, and among those that the group issued last.

    whole_bytes: of the full tensor; own_bytes: of this rank's part. Returns how to say that more has joined it.
    """
    sent = sent_bytes(kind, group.size, whole_bytes, own_bytes, last_bytes)
    return log_sent(kind, group, whole_bytes, sent, module, mode)


def log_sent(
    kind: str, group: AxisGroup, whole_bytes: int, sent: int, module: str, mode: str
) -> Callable[[int, int], None]:
    """The same, where it is known what this rank sends."""
    number = group.issued.add(Issued(kind, group.axes, whole_bytes, module))
    traced = trace.collective(kind, group.axes, group.ranks, whole_bytes, sent, mode=mode, module=module)

    def grow(size: int, sent: int) -> None:
        group.issued.grow(number, size)
        if traced is not None:
            traced(size, sent)

    return grow


@contextmanager
def part_of_one(group: AxisGroup) -> Iterator[None]:
    """Collectives inside are parts of one that has been logged already."""
    group.issued.paused += 1
    try:
        with trace.unlogged():
            yield
    finally:
        group.issued.paused -= 1


def tag_of(kind: str, group: AxisGroup, size: int, module: str) -> int:
    """The tag of the messages of one exchange, which members that issue another do not share.

    So nobody takes one operation's rows for another's; where sizes differ, gloo would end the process.
    """
    number = next(group.tags) % (2**15 - 1) + 1
    return number << 16 | zlib.crc32(f"{kind} {size} {module}".encode()) & 0xFFFF


class Meeting:
    """Until the member before this one issues the same collective of gloo's own, which knows no tags.

    One byte is on its way from when this is made; ``finish`` waits for it. A blocking collective waits before it
    starts. One that overlaps lets the byte travel beside it, since on a busy link it would stand in the queue behind
    all data, and the host with it: then a sum with another operation's data is an error before anybody reads it.
    """

    def __init__(self, kind: str, group: AxisGroup, size: int, module: str):
        self._group = group
        self._works: list[dist.Work] = []
        if group.backend != "gloo" or dist.get_backend(group.process_group) == "fake":
            return
        with trace.quiet():
            tag, n, me = tag_of(kind, group, size, module), group.size, group.index
            self._tokens = torch.zeros(2, dtype=torch.uint8)
            self._works.append(send(self._tokens[:1], (me + 1) % n, group, tag))
            self._works.append(receive(self._tokens[1:], (me - 1) % n, group, tag))

    def finish(self) -> None:
        """Until it has come."""
        works, self._works = self._works, []
        for work in works:
            await_work(work, self._group)


def send(tensor: torch.Tensor, peer: int, group: AxisGroup, tag: int) -> dist.Work:
    """Starts sending to the group's member number ``peer``."""
    try:
        return cast(dist.Work, dist.isend(tensor, group.ranks[peer], group=group.process_group, tag=tag))
    except RuntimeError as error:
        raise explained(error, group) from error


def receive(tensor: torch.Tensor, peer: int, group: AxisGroup, tag: int) -> dist.Work:
    """Starts receiving what the group's member number ``peer`` sends with the same tag."""
    try:
        return cast(dist.Work, dist.irecv(tensor, group.ranks[peer], group=group.process_group, tag=tag))
    except RuntimeError as error:
        raise explained(error, group) from error


def gather_into(whole: torch.Tensor, part: torch.Tensor, group: AxisGroup) -> dist.Work:
    """Starts the library's gather of equal parts."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
    return cast(dist.Work, gather(whole, part, group=group.process_group, async_op=True))


def scatter_from(part: torch.Tensor, whole: torch.Tensor, group: AxisGroup) -> dist.Work:
    """Starts the library's reduce-scatter into equal parts."""
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
    return cast(dist.Work, scatter(part, whole, group=group.process_group, async_op=True))


def pass_along(outgoing: torch.Tensor | None, incoming: torch.Tensor | None, group: AxisGroup) -> list[dist.Work]:
    """Starts sending to the next rank of the ring and receiving from the one before; None or empty is nothing.

    Messages of other sizes do not meet. NCCL runs what one rank issues in order, so there both are issued as one: two
    sends that wait for each other's receive would never end.
    """
    n, me = group.size, group.index
    moves = [
        (dist.irecv, incoming, (me - 1) % n),
        (dist.isend, outgoing, (me + 1) % n),
    ]
    wanted = [(kind, tensor, peer) for kind, tensor, peer in moves if tensor is not None and tensor.numel()]
    if group.backend == "nccl" and wanted:
        operations = [
            dist.P2POp(kind, tensor, group.ranks[peer], group=group.process_group) for kind, tensor, peer in wanted
        ]
        return dist.batch_isend_irecv(operations)
    return [
        (send if kind is dist.isend else receive)(tensor, peer, group, tensor.nbytes & 0xFFFF)
        for kind, tensor, peer in wanted
    ]


def places(whole: torch.Tensor, group: AxisGroup) -> list[torch.Tensor]:
    """The part of each rank, as views of the whole."""
    return list(whole.split(group.lengths(whole.shape[0])))


class AllGatherHandle:
    """whole[R] ← the parts of every rank, under way. The group has at least two ranks.

    ``wait(peer)`` returns when that rank's part is in its place; ``finish()`` when all are.
    """

    def __init__(self, part: torch.Tensor, whole: torch.Tensor, group: AxisGroup, module: str, mode: str):
        log("all_gather", group, whole.nbytes, part.nbytes, module, mode)
        self._number = group.issued.count - 1
        self.group, self.module, self.mode = group, module, mode
        self._part = part.contiguous()  # held until all has been sent
        self._rows = whole.shape[0]
        start, stop = group.bounds(self._rows)
        if part.shape != (stop - start, *whole.shape[1:]):
            raise ValueError(
                f"{module or 'all_gather'}: found a part of {part.shape[0]} rows; allowed: {stop - start}, "
                f"this rank's part of {whole.shape[0]} over {group.size} ranks"
            )
        self._all: dist.Work | None = None
        self._sends: list[dist.Work] = []
        self._arrivals: dict[int, dist.Work] = {}
        if group.backend == "nccl":
            if self._rows % group.size:
                work = dist.all_gather(places(whole, group), self._part, group=group.process_group, async_op=True)
                self._all = cast(dist.Work, work)
            else:
                self._all = gather_into(whole, self._part, group)
            return
        by_rank = places(whole, group)
        tag = tag_of("all_gather", group, whole.nbytes, module)
        peers = [(group.index + step) % group.size for step in range(1, group.size)]
        for peer in reversed(peers):
            if by_rank[peer].numel():
                self._arrivals[peer] = receive(by_rank[peer], peer, group, tag)
        self._sends = [send(self._part, peer, group, tag) for peer in peers if part.numel()]
        by_rank[group.index].copy_(self._part)

    def joined(self, launch: dist.Work) -> None:
        """It went with others as one launch, which is waited for instead."""
        self._all = launch

    def wait(self, peer: int) -> None:
        """Until the part of the group's member ``peer`` is there."""
        arrival = self._arrivals.pop(peer, None) or self._all
        if arrival is None:
            return
        self._tell()
        await_work(arrival, self.group, self._number)
        self._all = None

    def peers_of(self, rows: slice) -> list[int]:
        """The members that hold some of these rows of the whole, in the order of arrival."""
        n = self.group.size
        ring = [(self.group.index - step) % n for step in range(n)]
        bounds = {peer: self.group.bounds(self._rows, peer) for peer in ring}
        return [peer for peer in ring if bounds[peer][0] < rows.stop and rows.start < bounds[peer][1]]

    def turn(self, rows: slice) -> int:
        """After how many arrivals these rows are there."""
        peers = self.peers_of(rows)
        return (self.group.index - peers[-1]) % self.group.size if peers else 0

    def wait_rows(self, rows: slice) -> None:
        """Until these rows of the whole are there."""
        for peer in self.peers_of(rows):
            self.wait(peer)

    def finish(self) -> None:
        """Until everything is there, and everything sent."""
        if self._arrivals or self._all is not None:
            self._tell()
        if self._all is not None:
            await_work(self._all, self.group, self._number)
        for peer in list(self._arrivals):
            await_work(self._arrivals.pop(peer), self.group, self._number)
        for sent in self._sends:
            await_work(sent, self.group, self._number)
        self._sends, self._all = [], None

    def _tell(self) -> None:
        if self.mode != "blocking":
            trace.waited("all_gather", self.group.axes, self.module)


class ReduceScatterHandle:
    """part ← this rank's part of the sum over ranks of whole[R], under way. The group has at least two ranks.

    Sums run in ring order, whatever the mode: the share of the next rank, of the one after it, …, the own one last; in
    fp32 where ``wide``, and in the part's dtype where that is another than the whole's. Scratch on gloo: up to two
    parts for arrivals (none when n = 2); for a sum in another dtype than the whole's one or two, and one part in fp32
    unless the part is so itself.
    ``advance()`` takes in one more arrival, ``finish()`` all. The whole is only read.
    """

    def __init__(
        self, whole: torch.Tensor, part: torch.Tensor, group: AxisGroup, module: str, mode: str, wide: bool = False
    ):
        log("reduce_scatter", group, whole.nbytes, part.nbytes, module, mode)
        self._number = group.issued.count - 1
        self.group, self.module, self.mode = group, module, mode
        self._whole, self._part = whole.contiguous(), part
        self._wide = part.dtype != whole.dtype or (wide and part.dtype in (torch.bfloat16, torch.float16))
        self._all: dist.Work | None = None
        if group.backend == "nccl":
            self._all = self._on_nccl()
            return
        n, me = group.size, group.index
        self._places = places(self._whole, group)
        self._tag = tag_of("reduce_scatter", group, whole.nbytes, module)
        peers = [(me - s) % n for s in range(1, n)]
        self._sources = [(me + s) % n for s in range(1, n)] if part.numel() else []
        self._total = part
        if self._wide:
            self._total = self._new_total().zero_()
            count = min(2, n - 1) if part.numel() else 0
            self._scratch = [torch.empty_like(part, dtype=whole.dtype) for _ in range(count)]
        else:  # the first arrival lands in the result itself
            self._scratch = [torch.empty_like(part) for _ in range(min(2, n - 2) if part.numel() else 0)]
        self._taken = 0
        self._arrivals: list[tuple[dist.Work, torch.Tensor]] = []
        free = list(self._scratch) if self._wide else [part, *self._scratch]
        for source in self._sources[: len(free)]:
            buffer = free.pop(0)
            self._arrivals.append((receive(buffer, source, group, self._tag), buffer))
        self._sends = [send(self._places[peer], peer, group, self._tag) for peer in peers if self._places[peer].numel()]

    def joined(self, launch: dist.Work) -> None:
        """It went with others as one launch, which is waited for instead."""
        self._all = launch

    def _new_total(self) -> torch.Tensor:
        """Where a wide sum is added up: the part itself, if it is wide enough."""
        if self._part.dtype in (torch.bfloat16, torch.float16):
            return torch.empty_like(self._part, dtype=torch.float32)
        return self._part

    def _on_nccl(self) -> dist.Work:
        group = self.group
        self._total = self._new_total() if self._wide else self._part
        whole = self._whole.to(self._total.dtype)
        if whole.shape[0] % group.size:
            work = dist.reduce_scatter(self._total, places(whole, group), group=group.process_group, async_op=True)
            return cast(dist.Work, work)
        return scatter_from(self._total, whole, group)

    @property
    def more(self) -> bool:
        """Whether something is to come that has no room yet: the next ``advance`` makes it."""
        return self._all is None and self._taken + len(self._arrivals) < len(self._sources)

    def advance(self) -> None:
        """Takes in the next arrival, and lets the one after it travel."""
        if self._all is not None or not self._arrivals:
            return
        if self.mode != "blocking":
            trace.waited("reduce_scatter", self.group.axes, self.module)
        arrival, buffer = self._arrivals.pop(0)
        await_work(arrival, self.group, self._number)
        del arrival  # gloo's handles hold their tensors: let go of them in a fixed order
        self._taken += 1
        if buffer is not self._part or self._wide:
            self._total.add_(buffer)
            due = self._taken + len(self._arrivals)
            if due < len(self._sources):
                self._arrivals.append((receive(buffer, self._sources[due], self.group, self._tag), buffer))

    def finish(self) -> None:
        """Until the sum is in ``part``, and everything sent."""
        if self._all is not None:
            if self.mode != "blocking":
                trace.waited("reduce_scatter", self.group.axes, self.module)
            await_work(self._all, self.group, self._number)
            self._all = None
        else:
            while self._arrivals:
                self.advance()
            if self._part.numel():
                self._total.add_(self._places[self.group.index])
            for sent in self._sends:
                await_work(sent, self.group, self._number)
            self._sends = []
            self._scratch = []
        if self._total is not self._part:
            self._part.copy_(self._total)
