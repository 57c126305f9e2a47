"""Splitting by one thing exchanged for splitting by another: every rank sends a piece to every other.

Over n ranks, F' = units·width features in all:

| exchange        | in        | out       | packed                          |
|-----------------|-----------|-----------|---------------------------------|
| rows to columns | [T/n, F'] | [T, F'/n] | what is sent: columns lie apart |
| columns to rows | [T, F'/n] | [T/n, F'] | what arrives                    |

Of what it holds, a rank sends (1−1/n): 1/n of what an all-gather of either would move.
Columns are cut in units (heads) by ``AxisGroup.bounds``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.comm.exchange import log_sent, receive, send, tag_of
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work


def rows_to_columns(x: torch.Tensor, rows: int, unit: int, group: AxisGroup, module: str) -> torch.Tensor:
    """x [T_own,F'], this rank's of T = ``rows``, all features → [T, this rank's features]."""
    places = _columns(x.shape[1], unit, group)
    start, stop = places[group.index]
    whole = x.new_empty(rows, stop - start)
    parts = [whole[slice(*group.bounds(rows, peer))] for peer in range(group.size)]
    pieces = [x[:, start:stop].contiguous() for start, stop in places]
    _exchange(pieces, parts, group, rows * x.shape[1] * x.element_size(), module)
    return whole


def columns_to_rows(x: torch.Tensor, width: int, unit: int, group: AxisGroup, module: str) -> torch.Tensor:
    """x [T, this rank's features] of F' = ``width`` → [T_own, F']."""
    rows, places = x.shape[0], _columns(width, unit, group)
    bounds = [group.bounds(rows, peer) for peer in range(group.size)]
    start, stop = bounds[group.index]
    whole = x.new_empty(stop - start, width)
    parts = [x.new_empty(stop - start, last - first) for first, last in places]
    pieces = [x[first:last] for first, last in bounds]
    _exchange(pieces, parts, group, rows * width * x.element_size(), module)
    for (first, last), part in zip(places, parts, strict=True):
        whole[:, first:last] = part
    return whole


def _columns(width: int, unit: int, group: AxisGroup) -> list[tuple[int, int]]:
    bounds = (group.bounds(width // unit, peer) for peer in range(group.size))
    return [(start * unit, stop * unit) for start, stop in bounds]


def _exchange(
    pieces: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: AxisGroup, size: int, module: str
) -> None:
    """Sends pieces[peer] to each peer, whose own lands in parts[peer]."""
    me, n = group.index, group.size
    sent = sum(piece.nbytes for peer, piece in enumerate(pieces) if peer != me)
    log_sent("all_to_all", group, size, sent, module, "blocking")
    works: list[dist.Work]
    sources = [peer for step in range(1, n) if parts[peer := (me - step) % n].numel()]
    targets = [peer for step in range(1, n) if pieces[peer := (me + step) % n].numel()]
    if group.backend == "nccl":
        operations = [dist.P2POp(dist.irecv, parts[p], group.ranks[p], group=group.process_group) for p in sources]
        operations += [dist.P2POp(dist.isend, pieces[p], group.ranks[p], group=group.process_group) for p in targets]
        works = dist.batch_isend_irecv(operations) if operations else []
    else:
        tag = tag_of("all_to_all", group, size, module)
        works = [receive(parts[peer], peer, group, tag) for peer in sources]
        works += [send(pieces[peer], peer, group, tag) for peer in targets]
    parts[me].copy_(pieces[me])
    while works:
        await_work(works.pop(0), group)
