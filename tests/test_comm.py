"""Collectives, groups and the arena, on real ranks."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.runtime.arena import Arena, ArenaError
from shardwright.runtime.runtime import Runtime
from shardwright.trace import record
from support import dense
from support.ranks import on_ranks


def every_collective(dtype, rows):
    """Each collective's result against what the ranks' tensors, known everywhere, make; and its scratch."""
    n = dist.get_world_size()
    mesh = dense.mesh_of(tensor=n)
    group = Runtime.of(mesh).group(("tensor",))
    wholes = [
        torch.randint(-8, 8, (rows * n, 5), generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(n)
    ]
    mine = wholes[group.index]
    with record(mine) as trace:
        part = torch.empty(rows, 5, dtype=dtype)
        reduce_scatter(mine, part, group)
        gathered = torch.empty(rows * n, 5, dtype=dtype)
        all_gather(part, gathered, group)
        total = mine.clone()
        all_reduce(total, group)
    expected = sum(wholes)  # small whole numbers: exact in every dtype and order
    fine = torch.equal(part, expected.chunk(n)[group.index]) and torch.equal(gathered, expected)
    size = rows * n * 5 * dtype.itemsize
    scratch = trace.peaks[0].total  # input, part, gathered, total: nothing else may be alive at the end
    return fine and torch.equal(total, expected), [(c.kind, c.size, c.sent) for c in trace.collectives], size, scratch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_collectives_are_exact_and_counted(n, dtype):
    for fine, logged, size, peak in on_ranks(n, every_collective, dtype, 3):
        assert fine
        moved = size * (n - 1) // n
        assert logged == [("reduce_scatter", size, moved), ("all_gather", size, moved), ("all_reduce", size, 2 * moved)]
        # whole + part + gathered + total; the scratch of 2/n (none for two ranks) is gone before the last two came
        assert peak == max(3 * size + size // n, size + size // n + min(2, n - 2) * size // n)


def groups_by_ranks():
    mesh = dense.mesh_of(data=2, tensor=2)
    runtime = Runtime.of(mesh)
    before = len(dist.distributed_c10d._world.pg_map)
    both, world = runtime.group(("data", "tensor")), runtime.group(("tensor", "data"))
    for _ in range(5):
        for axes in ((), ("data",), ("tensor",), ("data", "tensor")):
            runtime.group(axes)
    sub = Runtime.of(mesh["tensor"])
    return (
        both is world,
        both.process_group is dist.group.WORLD,
        len(dist.distributed_c10d._world.pg_map) - before,
        runtime.group(()).size,
        sub is runtime,
        runtime.group(("data",)).ranks,
    )


def test_groups_are_keyed_by_ranks_and_made_once():
    for rank, (same, is_world, made, alone, shared, ranks) in enumerate(on_ranks(4, groups_by_ranks)):
        assert same and is_world and made == 0 and alone == 1 and shared
        assert ranks == ((rank % 2), (rank % 2) + 2)


def unknown_axis():
    with pytest.raises(sw.InputError, match=r"found axis 'expert'; allowed: the mesh's axes \(data, tensor\)"):
        Runtime.of(dense.mesh_of(data=2, tensor=2)).group(("expert",))
    with pytest.raises(sw.InputError, match="backend: found 'nccl'"):
        Runtime.of(dense.mesh_of(data=2, tensor=2), "nccl")


def test_unknown_axes_and_changed_backends_are_refused():
    on_ranks(4, unknown_axis)


CPU = torch.device("cpu")


def test_a_lease_has_an_owner_and_an_end():
    arena = Arena({"float32": [400, 100]})
    a = arena.lease((100,), torch.float32, CPU, "gathered", "first")
    b = arena.lease((5, 5), torch.float32, CPU, "unreduced", "second")
    assert arena.held == 500
    with pytest.raises(ArenaError, match=r"third asks for 4 B of float32 beside \(first 400 B, second 100 B\)"):
        arena.lease((1,), torch.float32, CPU, "gathered", "third")
    arena.end(b)
    assert b.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError):
        b @ b
    with pytest.raises(ArenaError, match="big asks for 101"):
        arena.lease((101,), torch.uint8, CPU, "bucket", "big")
    arena.end(a)
    arena.end(a)  # ending twice, or a tensor that was never leased, is nothing
    assert arena.held == 0 and arena.most == {"float32": [400, 100]}


def test_two_small_leases_do_not_fit_where_one_slot_is_small():
    arena = Arena({"float32": [400, 100]})
    held = arena.lease((50,), torch.float32, CPU, "gathered", "a")
    with pytest.raises(ArenaError):
        arena.lease((50,), torch.float32, CPU, "gathered", "b")
    assert held.numel() == 50


def test_a_dropped_tensor_ends_its_lease_and_a_given_one_keeps_its_memory():
    arena = Arena()
    a = arena.lease((100,), torch.float32, CPU, "gathered", "a")
    del a
    gc.collect()
    assert arena.held == 0
    b = arena.give(arena.lease((100,), torch.float32, CPU, "gathered", "b").fill_(1))
    arena.end(b)
    assert arena.held == 0 and b.sum() == 100


def test_poison_shows_readers_too_early_and_too_late():
    arena = Arena(poison=True)
    a = arena.lease((4,), torch.float32, CPU, "gathered", "a")
    assert a.isnan().all()
    a.fill_(1)
    with record() as trace:
        b = a * 2
        arena.end(a)
    assert a.isnan().all() and not b.isnan().any()
    assert [e.name for e in trace.events if hasattr(e, "name")] == [
        "aten.mul.Tensor"
    ]  # the fill is no part of the step


def test_a_release_frees_in_the_ledger_even_where_somebody_still_holds_the_tensor():
    for poison in (False, True):
        arena = Arena(poison=poison)
        with record() as trace:
            a = arena.lease((256,), torch.float32, CPU, "gathered", "a")
            arena.end(a)
            b = torch.zeros(8)
        assert trace.peak_bytes == 1024 and trace.points[-1].total == 32
        assert a is not None and b is not None


def gaps_are_refused():
    n = dist.get_world_size()
    group = Runtime.of(dense.mesh_of(tensor=n)).group(("tensor",))
    with pytest.raises(ValueError, match="contiguous"):
        all_reduce(torch.ones(4, 4).t()[:2], group)
    # a gather of a view with gaps is right all the same
    whole = torch.empty(3 * n, 2)
    view = torch.arange(12.0).view(3, 4)[:, ::2] + group.index
    all_gather(view, whole, group)
    return torch.equal(whole, torch.cat([torch.arange(12.0).view(3, 4)[:, ::2] + r for r in range(n)]))


def test_tensors_with_gaps():
    assert all(on_ranks(3, gaps_are_refused))
