"""Blocking collectives on plain tensors. Each is logged once, as one logical operation, where it is called.

Parts lie along dimension 0, in rank order (exchange.py tells how they travel).
"""

from __future__ import annotations

import time
from typing import cast

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.exchange import AllGatherHandle, Meeting, ReduceScatterHandle, log, part_of_one, places
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work, naming


def all_gather(part: torch.Tensor, whole: torch.Tensor, group: AxisGroup, module: str = "") -> None:
    """whole[R] ← the parts of every rank, in rank order. Sends its part to every other rank."""
    if group.size == 1:
        whole.copy_(part)
        return
    AllGatherHandle(part, whole, group, module, "blocking").finish()


def reduce_scatter(
    whole: torch.Tensor, part: torch.Tensor, group: AxisGroup, module: str = "", wide: bool = False
) -> None:
    """part ← this rank's part of the sum over ranks of whole[R]. Sends every other rank its part.

    wide: low-precision sums are taken in fp32. The whole is only read.
    """
    if group.size == 1:
        part.copy_(whole)
        return
    ReduceScatterHandle(whole, part, group, module, "blocking", wide).finish()


class AllReduceHandle:
    """tensor ← its sum over ranks, in place, under way; ``finish()`` waits. The tensor must be contiguous.

    overlaps: something is computed meanwhile, so that the host must not wait for others here; by default so unless the
    mode is blocking.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        group: AxisGroup,
        module: str,
        mode: str,
        wide: bool = False,
        overlaps: bool | None = None,
    ):
        if not tensor.is_contiguous():
            raise ValueError(
                "all_reduce: found a tensor with gaps; allowed: a contiguous one (gloo would sum it wrongly)"
            )
        log("all_reduce", group, tensor.nbytes, tensor.nbytes, module, mode)
        self._number = group.issued.count - 1
        self.group, self.module, self.mode = group, module, mode
        self._storage = tensor.untyped_storage()
        self._holders = torch._C._storage_Use_Count(self._storage._cdata)
        self._work: dist.Work | None = None
        if wide and tensor.dtype in (torch.bfloat16, torch.float16):
            _reduce_wide(tensor, group, module)
            return
        self._meeting = Meeting("all_reduce", group, tensor.nbytes, module)
        if not (mode != "blocking" if overlaps is None else overlaps):
            self._meeting.finish()
        with naming(group):
            self._work = cast(dist.Work, dist.all_reduce(tensor.detach(), group=group.process_group, async_op=True))

    def joined(self, launch: dist.Work) -> None:
        """It went with others as one launch, which is waited for instead."""
        self._work = launch

    def finish(self) -> None:
        """Until the sum is there."""
        if self._work is None:
            return
        if self.mode != "blocking":
            trace.waited("all_reduce", self.group.axes, self.module)
        await_work(self._work, self.group, self._number)
        self._meeting.finish()
        self._work = None
        if self.group.backend == "gloo":
            _await_holders(self._storage, self._holders)


def all_reduce(tensor: torch.Tensor, group: AxisGroup, module: str = "", wide: bool = False) -> None:
    """tensor ← its sum over ranks, in place. Sends 2(n−1)/n of it. The tensor must be contiguous.

    wide: low-precision sums are taken in fp32 (a reduce-scatter and an all-gather, logged as the one all-reduce).
    """
    if group.size > 1:
        AllReduceHandle(tensor, group, module, "blocking", wide).finish()


def _reduce_wide(tensor: torch.Tensor, group: AxisGroup, module: str) -> None:
    flat = tensor.view(-1)
    mine = places(flat, group)[group.index]
    part = torch.empty_like(mine)
    with part_of_one(group):
        ReduceScatterHandle(flat, part, group, module, "blocking", wide=True).finish()
        AllGatherHandle(part, flat, group, module, "blocking").finish()


def _await_holders(storage: torch.UntypedStorage, holders: int) -> None:
    """gloo's worker holds its tensors for a moment after wait(); memory must come free when the program says so."""
    deadline = time.monotonic() + 1.0
    while torch._C._storage_Use_Count(storage._cdata) > holders and time.monotonic() < deadline:
        time.sleep(0)
