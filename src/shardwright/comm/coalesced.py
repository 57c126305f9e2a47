"""Collectives of several tensors over one group, as one logical operation: a unit's gathers, its reductions.

The parts travel each from and to its own place, without packing. On NCCL all are one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.collectives import AllReduceHandle
from shardwright.comm.exchange import AllGatherHandle, ReduceScatterHandle, log, part_of_one
from shardwright.comm.groups import AxisGroup
from shardwright.spec.collectives import sent_bytes

_coalescing_manager: Any = dist.distributed_c10d._coalescing_manager


class Logged:
    """One logical operation of the trace, which launches join one after the other."""

    def __init__(self) -> None:
        self._whole = self._own = 0
        self._begun = False
        self._grow: Callable[[int, int], None] | None = None

    def join(self, kind: str, group: AxisGroup, whole_bytes: int, own_bytes: int, module: str, mode: str) -> None:
        """A launch of ``whole_bytes``, ``own_bytes`` of them this rank's; the first one begins the operation."""
        begun, self._begun = self._begun, True
        self._whole, self._own = self._whole + whole_bytes, self._own + own_bytes
        if not begun:
            self._grow = log(kind, group, whole_bytes, own_bytes, module, mode)
        elif self._grow is not None:
            self._grow(self._whole, sent_bytes(kind, group.size, self._whole, self._own))


class _Together:
    """Handles under way that are waited for as one. logged: the operation that they join, by default their own."""

    kind: str

    def __init__(
        self, group: AxisGroup, module: str, mode: str, whole_bytes: int, own_bytes: int, logged: Logged | None = None
    ):
        (logged or Logged()).join(self.kind, group, whole_bytes, own_bytes, module, mode)
        self.group, self.module, self.mode = group, module, mode
        self._launch: dist.Work | None = None
        self._each: Sequence[AllGatherHandle | ReduceScatterHandle | AllReduceHandle] = ()

    @contextmanager
    def _one_launch(self, alike: bool) -> Iterator[None]:
        """alike: every operation is one of those that NCCL can launch together (cut evenly, in one precision)."""
        process_group = self.group.process_group
        # A rehearsal's process group has no coalesced operators, and sends nothing that one launch would make faster.
        if not alike or self.group.backend != "nccl" or dist.get_backend(process_group) == "fake":
            with part_of_one(self.group):
                yield
            return
        try:
            with (
                part_of_one(self.group),
                _coalescing_manager(group=process_group, async_ops=True) as launch,
            ):
                yield
        except BaseException:  # else the group would only collect whatever is issued over it from now on
            dist.distributed_c10d._world.pg_coalesce_state.pop(cast(dist.ProcessGroup, process_group), None)
            raise
        self._launch = cast(dist.Work, launch)

    def finish(self) -> None:
        """Until all is there, and all that was sent is away."""
        if self.mode != "blocking":
            trace.waited(self.kind, self.group.axes, self.module)
        with trace.unlogged():
            for handle in self._each:
                if self._launch is not None:
                    handle.joined(self._launch)
                handle.finish()
        self._each = ()


def _even(wholes: Iterable[torch.Tensor], group: AxisGroup) -> bool:
    return all(whole.shape[0] % group.size == 0 for whole in wholes)


class CoalescedAllGatherHandle(_Together):
    """whole_i[R_i] ← the parts of every rank, for each pair (part_i, whole_i)."""

    kind = "all_gather"

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        group: AxisGroup,
        module: str,
        mode: str,
        logged: Logged | None = None,
    ):
        whole_bytes = sum(whole.nbytes for _, whole in pairs)
        super().__init__(group, module, mode, whole_bytes, sum(part.nbytes for part, _ in pairs), logged)
        with self._one_launch(_even((whole for _, whole in pairs), group)):
            self._each = [AllGatherHandle(part, whole, group, module, "blocking") for part, whole in pairs]


class CoalescedReduceScatterHandle(_Together):
    """part_i ← this rank's part of the sum over ranks of whole_i[R_i], for each pair (whole_i, part_i).

    A part wider than its whole is added up in the part's precision: the whole travels as it is.
    """

    kind = "reduce_scatter"

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        group: AxisGroup,
        module: str,
        mode: str,
        wide: bool = False,
        logged: Logged | None = None,
    ):
        whole_bytes = sum(whole.nbytes for whole, _ in pairs)
        own = sum(part.numel() * whole.element_size() for whole, part in pairs)
        super().__init__(group, module, mode, whole_bytes, own, logged)
        with self._one_launch(_even((whole for whole, _ in pairs), group)):
            self._each = [ReduceScatterHandle(whole, part, group, module, "blocking", wide) for whole, part in pairs]

    def advance(self) -> None:
        """Takes in what is next to arrive where something is to follow in its place. Nothing else is waited for."""
        with trace.unlogged():
            for handle in cast(Sequence[ReduceScatterHandle], self._each):
                if handle.more:
                    handle.advance()


class CoalescedAllReduceHandle(_Together):
    """tensor_i ← its sum over ranks, in place, for each tensor. All must be contiguous."""

    kind = "all_reduce"

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: AxisGroup,
        module: str,
        mode: str,
        wide: bool = False,
        logged: Logged | None = None,
    ):
        size = sum(tensor.nbytes for tensor in tensors)
        super().__init__(group, module, mode, size, size, logged)
        with self._one_launch(not wide):
            overlaps = mode != "blocking"
            self._each = [AllReduceHandle(tensor, group, module, "blocking", wide, overlaps) for tensor in tensors]

    def advance(self) -> None:
        """Nothing to do: the library's all-reduce runs by itself."""
