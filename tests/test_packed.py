"""Packed gathers and all-reduces: what small tensors become, and as how many messages (ACCEPTANCE C19)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwright.comm.coalesced import CoalescedAllGatherHandle
from shardwright.runtime.packed import PackedAllGatherHandle, PackedAllReduceHandle
from shardwright.runtime.runtime import Runtime
from shardwright.trace import record
from support.ranks import on_ranks
from test_bucket import SHAPES, gradient_of, line, mine, most_alive, summed


def packed_gather(shapes, dtype, leased):
    group = Runtime.of(line()).group(("data",))
    arena = Runtime.of(line()).arena
    wholes = [gradient_of(shape, 0, i, torch.float32) for i, shape in enumerate(shapes)]
    parts = [mine(whole).clone() for whole in wholes]
    found = [torch.full_like(whole, torch.nan, dtype=dtype) for whole in wholes]
    with record(*parts, *found) as trace:
        pairs = list(zip(parts, found, strict=True))
        handle = PackedAllGatherHandle(pairs, group, "unit", "async", arena if leased else None)
        handle.finish()
        handle.finish()
        del handle, pairs
    fine = all(torch.equal(a.float(), b) for a, b in zip(found, wholes, strict=True))
    size, own = (sum(t.numel() for t in some) * dtype.itemsize for some in (wholes, parts))
    logged = [(c.kind, c.module, c.size, c.sent) for c in trace.collectives]
    due = [("all_gather", "unit", size, own * (dist.get_world_size() - 1))]
    sends = trace.points[-1].total - trace.points[0].total
    return fine, logged == due, sends, arena.held, most_alive(trace, "gathered") == ((size, 0) if leased else (0, 0))


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_small_gathers_travel_as_one_message_to_each_rank(n, dtype, leased):
    assert on_ranks(n, packed_gather, SHAPES, dtype, leased) == [(True, True, 0, 0, True)] * n


def packed_on_nccl(shapes):
    """What is done where nccl is declared; gloo's all-gather stands in for its."""
    group = Runtime(line(), "nccl").group(("data",))
    wholes = [gradient_of(shape, 0, i, torch.float32) for i, shape in enumerate(shapes)]
    found = [torch.full_like(whole, torch.nan) for whole in wholes]
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with mock.patch.object(dist, name, side_effect=getattr(dist, name)) as gathers:
        PackedAllGatherHandle(
            [(mine(w).clone(), f) for w, f in zip(wholes, found, strict=True)], group, "", "async"
        ).finish()
    return all(map(torch.equal, found, wholes)), gathers.call_count


@pytest.mark.parametrize("n", [2, 3, 8])
def test_on_nccl_a_packed_gather_is_one_collective_also_of_what_does_not_divide(n):
    assert on_ranks(n, packed_on_nccl, SHAPES) == [(True, 1)] * n


def messages(packed: bool) -> int:
    """How many sends this rank makes to gather all."""
    group = Runtime.of(line()).group(("data",))
    pairs = [(torch.ones(2), torch.zeros(2 * group.size)) for _ in range(10)]
    with mock.patch.object(dist, "isend", side_effect=dist.isend) as sends:
        (PackedAllGatherHandle if packed else CoalescedAllGatherHandle)(pairs, group, "", "blocking").finish()
    return sends.call_count


def test_ten_small_gathers_are_one_message_a_peer():
    assert on_ranks(4, messages, True) == [3] * 4
    assert on_ranks(4, messages, False) == [30] * 4


def packed_reduction(shapes, dtype, wide):
    group = Runtime.of(line()).group(("data",))
    tensors = [gradient_of(shape, dist.get_rank(), i, dtype) for i, shape in enumerate(shapes)]
    tensors.append(torch.tensor(1.0, dtype=dtype))
    with record(*tensors) as trace:
        handle = PackedAllReduceHandle(tensors, group, "unit", "async", wide)
        handle.advance()
        handle.finish()
    expected = [*(summed(shape, i) for i, shape in enumerate(shapes)), torch.tensor(float(group.size))]
    fine = all(torch.equal(a.double(), b.double()) for a, b in zip(tensors, expected, strict=True))
    size = sum(t.numel() for t in tensors) * (4 if wide else dtype.itemsize)
    return fine, [(c.kind, c.size, c.mode) for c in trace.collectives] == [("all_reduce", size, "async")]


@pytest.mark.parametrize("dtype, wide", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_small_all_reduces_are_one(n, dtype, wide):
    assert on_ranks(n, packed_reduction, SHAPES, dtype, wide) == [(True, True)] * n


def mixed_types():
    group = Runtime.of(line()).group(("data",))
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    with pytest.raises(ValueError, match=r"unit: found torch.float32 and torch.float64; allowed: one element type"):
        PackedAllReduceHandle(tensors, group, "unit", "async")
    with pytest.raises(ValueError, match=r"unit: found a part of shape \(3,\); allowed: \(1,\)"):
        PackedAllGatherHandle([(torch.ones(3), torch.ones(2))], group, "unit", "async")


def test_packed_collectives_refuse_what_does_not_fit():
    on_ranks(2, mixed_types)
