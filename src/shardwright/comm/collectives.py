"""Blocking collectives on plain tensors. Each is logged once, as one logical operation, where it is called.

Parts lie along dimension 0, in rank order. Over n ranks, a whole of R rows has parts of ⌈R/n⌉ rows; where R does not
divide, the last parts are shorter or empty.

On gloo a gather and a reduce-scatter are *direct exchanges*: every rank sends to, and receives from, each other rank
without a copy on the sending side. gloo's own reduce-scatter is an all-reduce (twice the bytes), and its all-gather
hides a buffer of the full size; here a gather lands in its place, and a reduction needs 2/n of its tensor as scratch.
"""

from __future__ import annotations

import time
from typing import cast

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.groups import AxisGroup
from shardwright.mesh import chunk


def _log(kind: str, group: AxisGroup, whole: torch.Tensor, part: torch.Tensor, module: str) -> None:
    size, own, others = whole.nbytes, part.nbytes, group.size - 1
    sent = {"all_gather": own * others, "reduce_scatter": size - own, "all_reduce": 2 * size * others // group.size}
    trace.collective(kind, group.axes, group.ranks, size, sent[kind], module=module)


def _places(whole: torch.Tensor, group: AxisGroup) -> list[torch.Tensor]:
    """The part of each rank, as views of the whole."""
    bounds = [chunk(whole.shape[0], group.size, index) for index in range(group.size)]
    return [whole[start:stop] for start, stop in bounds]


def _send(tensor: torch.Tensor, peer: int, group: AxisGroup) -> dist.Work:
    return cast(dist.Work, dist.isend(tensor, group.ranks[peer], group=group.process_group))


def _receive(tensor: torch.Tensor, peer: int, group: AxisGroup) -> dist.Work:
    return cast(dist.Work, dist.irecv(tensor, group.ranks[peer], group=group.process_group))


def all_gather(part: torch.Tensor, whole: torch.Tensor, group: AxisGroup, module: str = "") -> None:
    """whole[R] ← the parts of every rank, in rank order. Sends its part to every other rank."""
    if group.size == 1:
        whole.copy_(part)
        return
    _log("all_gather", group, whole, part, module)
    part = part.contiguous()
    places = _places(whole, group)
    if part.shape != places[group.index].shape:
        raise ValueError(
            f"{module or 'all_gather'}: found a part of {part.shape[0]} rows; allowed: {places[group.index].shape[0]}, "
            f"this rank's part of {whole.shape[0]} over {group.size} ranks"
        )
    if group.backend == "nccl":
        if whole.shape[0] % group.size:
            dist.all_gather(places, part, group=group.process_group)
        else:
            dist.all_gather_into_tensor(whole, part, group=group.process_group)
        return
    peers = [(group.index + step) % group.size for step in range(1, group.size)]
    works = [_send(part, peer, group) for peer in peers if part.numel()]
    works += [_receive(places[peer], peer, group) for peer in reversed(peers) if places[peer].numel()]
    places[group.index].copy_(part)
    for work in works:
        work.wait()


def reduce_scatter(whole: torch.Tensor, part: torch.Tensor, group: AxisGroup, module: str = "") -> None:
    """part ← this rank's part of the sum over ranks of whole[R]. Sends every other rank its part.

    Scratch: two parts (one when n = 2). The whole is only read.
    """
    if group.size == 1:
        part.copy_(whole)
        return
    _log("reduce_scatter", group, whole, part, module)
    whole = whole.contiguous()
    places = _places(whole, group)
    if group.backend == "nccl":
        if whole.shape[0] % group.size:
            dist.reduce_scatter(part, places, group=group.process_group)
        else:
            dist.reduce_scatter_tensor(part, whole, group=group.process_group)
        return
    n, me = group.size, group.index
    peers = [(me + s) % n for s in range(1, n)]
    sends = [_send(places[peer], peer, group) for peer in peers if places[peer].numel()]
    part.copy_(places[me])
    if part.numel():
        scratch = [torch.empty_like(part) for _ in range(min(2, n - 1))]
        arrival = _receive(scratch[0], (me - 1) % n, group)
        for s in range(1, n):
            arrival.wait()
            if s + 1 < n:  # the next piece travels while this one is added
                arrival = _receive(scratch[s % 2], (me - s - 1) % n, group)
            part.add_(scratch[(s - 1) % 2])
        del arrival  # gloo's handles hold their tensors: let go of them before the scratch, in a fixed order
    for send in sends:
        send.wait()


def all_reduce(tensor: torch.Tensor, group: AxisGroup, module: str = "") -> None:
    """tensor ← its sum over ranks, in place. Sends 2(n−1)/n of it. The tensor must be contiguous."""
    if group.size == 1:
        return
    if not tensor.is_contiguous():
        raise ValueError("all_reduce: found a tensor with gaps; allowed: a contiguous one (gloo would sum it wrongly)")
    _log("all_reduce", group, tensor, tensor, module)
    storage = tensor.untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata)
    dist.all_reduce(tensor.detach(), group=group.process_group)
    _await_holders(storage, holders)


def _await_holders(storage: torch.UntypedStorage, holders: int) -> None:
    """gloo's worker holds its tensors for a moment after wait(); memory must come free when the program says so."""
    deadline = time.monotonic() + 1.0
    while torch._C._storage_Use_Count(storage._cdata) > holders and time.monotonic() < deadline:
        time.sleep(0)
