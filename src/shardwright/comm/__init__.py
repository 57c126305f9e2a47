"""Communication: groups by ranks, collectives that are logged where they are called, the arena of leased memory."""

from shardwright.comm.arena import Arena, ArenaError
from shardwright.comm.bins import Bins
from shardwright.comm.bucket import GradientBucket
from shardwright.comm.collectives import AllReduceHandle, all_gather, all_reduce, reduce_scatter
from shardwright.comm.divergence import DivergenceError
from shardwright.comm.exchange import AllGatherHandle, ReduceScatterHandle
from shardwright.comm.groups import AxisGroup
from shardwright.comm.packed import PackedAllGatherHandle, PackedAllReduceHandle
from shardwright.comm.reduction import Reduction, reduce_output
from shardwright.comm.runtime import Runtime
from shardwright.comm.together import (
    CoalescedAllGatherHandle,
    CoalescedAllReduceHandle,
    CoalescedReduceScatterHandle,
    Logged,
)
from shardwright.comm.waits import await_work, naming

__all__ = [
    "AllGatherHandle",
    "AllReduceHandle",
    "Arena",
    "ArenaError",
    "AxisGroup",
    "Bins",
    "CoalescedAllGatherHandle",
    "CoalescedAllReduceHandle",
    "CoalescedReduceScatterHandle",
    "DivergenceError",
    "GradientBucket",
    "Logged",
    "PackedAllGatherHandle",
    "PackedAllReduceHandle",
    "ReduceScatterHandle",
    "Reduction",
    "Runtime",
    "all_gather",
    "all_reduce",
    "await_work",
    "naming",
    "reduce_output",
    "reduce_scatter",
]
