"""The store and its collectives by NCCL's rules, which gloo stands in for; the stand-in finds who breaks them."""

from __future__ import annotations

import functools
import itertools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import shardwright as sw
import test_faithful_store
from shardwright.comm.all_to_all import columns_to_rows, rows_to_columns
from shardwright.comm.coalesced import (
    CoalescedAllGatherHandle,
    CoalescedAllReduceHandle,
    CoalescedReduceScatterHandle,
)
from shardwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.comm.exchange import pass_along
from shardwright.runtime.runtime import Runtime
from support import dense, grids
from support.emulated_nccl import TIMING, emulated_mesh
from support.nets import ALL, FEW, gradients_match
from support.operations import BrokenRule
from support.ranks import drop, on_ranks

TIMINGS = ("earliest", "latest", "random")


def mesh_timed(timing, seed=0, order=None):
    return functools.partial(emulated_mesh, timing, seed, order)


# -- the product -------------------------------------------------------------------------------------------------------


def gradients_and_unfinished(axes, names, levels, timing, seed=0, order=None):
    return gradients_match(axes, names, levels, True, mesh_timed(timing, seed, order)), TIMING.unfinished()


@pytest.mark.parametrize(
    ("axes", "names", "levels", "timing", "order"),
    [
        ({"data": 2}, ("shared weights, root kept",), ("replicate", "kept"), "earliest", None),
        ({"data": 2}, ("everything",), ("gradients", "parameters"), "latest", None),
        ({"data": 2}, ("recomputed inside",), ALL, "random", None),
        ({"data": 3}, ("everything",), ("optimizer", "parameters"), "random", None),
        ({"data": 3}, ("shared weights",), ("gradients", "parameters"), "latest", None),
        ({"replica": 2, "shard": 2}, FEW[-1:], ("optimizer",), "random", None),
        ({"replica": 2, "shard": 2}, FEW[-1:], ("parameters",), "latest", (0, 2, 1, 3)),
    ],
)
def test_gradients_equal_dense(axes, names, levels, timing, order):
    world = torch.Size(axes.values()).numel()
    for wrong, unfinished in on_ranks(world, gradients_and_unfinished, axes, names, levels, timing, 7, order):
        assert wrong == {} and unfinished == []


def with_unused(program, level, timing, *args):
    """A program of ranks that use different modules."""
    mesh = emulated_mesh(timing, 3, data=dist.get_world_size())
    try:
        with mock.patch.object(test_faithful_store, "mesh_of_all", lambda: mesh):
            return program(level, *args)
    finally:  # what the last step gathered for others only, nobody waits for
        TIMING.read_all()
        TIMING.open.clear()


@pytest.mark.parametrize(
    ("level", "timing"), [("replicate", "random"), ("optimizer", "latest"), ("gradients", "random")]
)
def test_ranks_may_use_different_modules(level, timing):
    assert max(on_ranks(3, with_unused, test_faithful_store.depth_errors, level, timing)) <= 1e-12


def gathered_for_others(level):
    """Steps in which each rank leaves out blocks that others use: nobody here waits for their gathers."""
    model = test_faithful_store.sharded(test_faithful_store.Depth().double(), level, unused="zeros")
    for step in range(5):
        x = dense.random(5, 6, seed=10 * step + dist.get_rank())
        (model(x, [(), (1,), (0, 3)][(dist.get_rank() + step) % 3]) * x).sum().backward()
        model.zero_grad()


def test_a_gather_that_nobody_waited_for_has_ended_before_the_next():
    on_ranks(3, with_unused, gathered_for_others, "optimizer", "latest")


@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_ranks_may_use_different_modules_of_one_group(timing):
    found = on_ranks(2, with_unused, test_faithful_store.expert_gradients, "parameters", timing, [""])
    assert found == [[[10.0, 100.0]] * 3] * 2


def whole_of(rank, rows, dtype=torch.float64, seed=0):
    return dense.random(rows, 3, seed=100 * seed + rank).to(dtype)


def every_collective(axes, timing, order, rows):
    """The largest error of each collective over all ``axes``, whose parts are cut axis after axis."""
    mesh = emulated_mesh(timing, 1, order, **axes)
    group, n = Runtime.of(mesh).group(tuple(axes)), dist.get_world_size()
    wholes = [whole_of(rank, rows) for rank in group.ranks]
    total, me = sum(wholes), group.index
    start, stop = group.bounds(rows)
    part, gathered, summed = torch.empty(stop - start, 3).double(), torch.empty(rows, 3).double(), wholes[me].clone()
    reduce_scatter(wholes[me], part, group)
    all_gather(part, gathered, group)
    all_reduce(summed, group)
    errors = {
        "reduce_scatter": (part, total[start:stop]),
        "all_gather": (gathered, total),
        "all_reduce": (summed, total),
    }
    if rows % n == 0:
        columns = rows_to_columns(part.repeat(1, n), rows, 3, group, "")
        errors |= {
            "columns": (columns, total),
            "rows": (columns_to_rows(columns, 3 * n, 3, group, ""), part.repeat(1, n)),
        }
    coming = torch.empty(rows, 3).double()
    for work in pass_along(wholes[me], coming, group):
        work.wait()
    errors["ring"] = coming, wholes[me - 1]
    found = {name: dense.error(*pair) if pair[0].numel() else 0 for name, pair in errors.items()}
    return {name: error for name, error in found.items() if error > 1e-12} | dict.fromkeys(TIMING.unfinished())


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("rows", [8, 7, 2])
@pytest.mark.parametrize(
    ("axes", "order"), [({"data": 3}, None), ({"a": 2, "b": 2}, None), ({"a": 2, "b": 2}, (0, 2, 1, 3))]
)
def test_collectives_are_exact(axes, order, rows, timing):
    """Uneven and empty parts too, and where ranks do not ascend in the mesh: parts come in mesh order."""
    for wrong in on_ranks(torch.Size(axes.values()).numel(), every_collective, axes, timing, order, rows):
        assert wrong == {}


def sums_in_float32(timing, together):
    """Errors of bf16 gradients summed in fp32, to the last bit of bf16, against sums that are rounded at each rank."""
    n = 3
    group = Runtime.of(emulated_mesh(timing, data=n)).group(("data",))
    found = []
    for rows in (6, 7):
        start, stop = group.bounds(rows)
        wholes = [whole_of(rank, rows, torch.bfloat16) * 3**rank for rank in range(n)]
        exact = sum(whole.float() for whole in wholes)
        mine = wholes[group.index]
        for dtype in (torch.bfloat16, torch.float32):
            part, summed = torch.empty(stop - start, 3, dtype=dtype), mine.clone()
            if together:
                handles = [CoalescedReduceScatterHandle([(mine, part), (mine, part.clone())], group, "", "async", True)]
                handles += [CoalescedAllReduceHandle([summed, mine.clone()], group, "", "async", True)]
                for handle in handles:
                    handle.finish()
            else:
                reduce_scatter(mine, part, group, wide=True)
                all_reduce(summed, group, wide=True)
            found += [torch.equal(part, exact[start:stop].to(dtype)), torch.equal(summed, exact.bfloat16())]
    return found


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_low_precision_is_added_up_in_float32(timing, together):
    for found in on_ranks(3, sums_in_float32, timing, together):
        assert all(found), found


def summed_in_buckets(timing):
    """Gradients of any rows through buckets of both kinds, in bf16 too, on three ranks: the largest error."""
    mesh = emulated_mesh(timing, 5, data=3)
    errors = []
    for kind, dtype in itertools.product(("reduce_scatter", "all_reduce"), (torch.float32, torch.bfloat16)):
        bucket = sw.GradientBucket(600, axes=mesh, kind=kind, reduce_dtype=torch.float32)
        pairs = []
        for number, rows in enumerate((6, 7, 1, 5, 8)):
            wholes = [whole_of(rank, rows, dtype, number) for rank in range(3)]
            start, stop = bucket.group.bounds(rows) if kind == "reduce_scatter" else (0, rows)
            destination = torch.zeros(stop - start, 3)
            bucket.add(wholes[dist.get_rank()], destination)
            pairs.append((destination, sum(whole.float() for whole in wholes)[start:stop]))
        bucket.flush()
        errors += [dense.error(*pair) for pair in pairs if pair[0].numel()]
    return max(errors)


@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_buckets_are_exact(timing):
    assert max(on_ranks(3, summed_in_buckets, timing)) <= 1e-5


def on_a_grid(timing):
    """Errors of linears on a grid in every mode of overlap."""
    axes, errors = {"i": 1, "j": 2, "l": 2}, {}
    for name, kind, overlap in itertools.product(grids.DESIGNS, grids.KINDS, ("blocking", "async", "ring")):
        layout = grids.layout_of(name, kind, overlap=overlap)
        error, _, _ = grids.run(layout, axes, grids.UNEVEN, True, 2, 2, True, mesh_timed(timing, 2))
        errors[name, kind, overlap] = error
    return {key: error for key, error in errors.items() if not error <= 1e-12}, TIMING.unfinished()


@pytest.mark.parametrize("timing", TIMINGS)
def test_linears_on_a_grid_equal_dense(timing):
    assert on_ranks(4, on_a_grid, timing) == [({}, [])] * 4


def after_an_error_while_coalescing():
    """What an all-reduce gives after an error within a launch of several gathers."""
    group = Runtime.of(emulated_mesh("latest", data=2)).group(("data",))
    with pytest.raises(ValueError, match="found a part of 2 rows; allowed: 1"):
        pairs = [(torch.ones(1, 3), torch.empty(2, 3)), (torch.ones(2, 3), torch.empty(2, 3))]
        CoalescedAllGatherHandle(pairs, group, "", "async")
    tensor = torch.ones(3)
    all_reduce(tensor, group)
    return tensor.tolist(), len(c10d._world.pg_coalesce_state)


def test_an_error_while_coalescing_leaves_the_group_as_it_was():
    assert on_ranks(2, after_an_error_while_coalescing) == [([2.0, 2.0, 2.0], 0)] * 2


def whole_parameter(order):
    """A parameter that is stored over both axes, put together by DTensor: its largest error."""
    mesh = dense.mesh_of(a=2, b=2) if order is None else _unusual(order)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 8).double()
    expected = model.weight.detach().clone()
    model = sw.shard(model, mesh, {"a": "parameters", "b": "parameters"})
    return dense.error(model.weight.full_tensor(), expected), model.weight.to_local().shape[0]


def _unusual(order):
    return dist.DeviceMesh("cpu", torch.tensor(order).view(2, 2), mesh_dim_names=("a", "b"))


@pytest.mark.parametrize("order", [None, (0, 2, 1, 3)])
def test_what_dtensor_puts_together_is_in_mesh_order(order):
    assert on_ranks(4, whole_parameter, order) == [(0.0, 2)] * 4


def descending():
    mesh = dist.DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("data",))
    with pytest.raises(sw.InputError, match="mesh: found ranks 1, 0 along 'data'; allowed: ascending along each axis"):
        Runtime.of(mesh)


def test_ranks_that_descend_along_an_axis_are_refused():
    """torch sorts a group's members: DTensor would put parts together in another order than the mesh says."""
    on_ranks(2, descending)


def undeclared():
    """A mesh whose library has rules that we do not know."""
    emulated_mesh("latest", data=2)
    override = (("emulated_nccl", None),)
    mesh = dist.DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("data",), backend_override=override)
    with pytest.raises(sw.InputError, match="mesh: found groups of 'emulated_nccl'; allowed: gloo, nccl"):
        Runtime.of(mesh)


def test_a_library_that_we_do_not_know_is_refused():
    on_ranks(2, undeclared)


# -- the stand-in: each rule broken once -------------------------------------------------------------------------------


def wait_after(change, timing="latest"):
    """A gather of two elements a rank; ``change(part, whole)`` comes between its launch and its wait."""

    def program(group):
        part, whole = torch.ones(2), torch.zeros(4)
        work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        change(part, whole)
        work.wait()

    return timing, program


def differently(*programs):
    """Each rank runs its own."""

    def program(group):
        work = programs[dist.get_rank()](group)
        work.wait()

    return "latest", program


def reducing(count, dtype=torch.float32):
    return lambda group: dist.all_reduce(torch.ones(count, dtype=dtype), group=group, async_op=True)


def gathering(group):
    return dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), group=group, async_op=True)


def together(count):
    def launch(group):
        with c10d._coalescing_manager(group=group, async_ops=True) as launched:
            for _ in range(count):
                dist.all_reduce(torch.ones(3), group=group, async_op=True)
        return launched

    return launch


def message(count):
    def launch(group):
        tensor = torch.ones(count)
        return dist.isend(tensor, 1, group=group) if dist.get_rank() == 0 else dist.irecv(tensor, 0, group=group)

    return launch


BROKEN = {
    "input, late": (*wait_after(lambda part, _: part.add_(1)), r"all_gather of float32 \[2\]: an input was written to"),
    "input, early": (*wait_after(lambda part, _: part.add_(1), "earliest"), "an input was written to before the wait"),
    "output": (*wait_after(lambda _, whole: whole[3:].zero_()), "an output was written to before the wait"),
    "output, early": (*wait_after(lambda _, whole: whole.add_(1), "earliest"), "an output was written to"),
    "freed": (*wait_after(lambda part, _: part.untyped_storage().resize_(0)), "the storage of an input was resized"),
    "sizes": (
        *differently(reducing(3), reducing(5)),
        r"issues all_reduce \(SUM\) of float32 \[[35]\], rank \d issues all_reduce \(SUM\) of float32 \[[35]\]",
    ),
    "types": (*differently(reducing(3), reducing(3, torch.float64)), r"float(32|64) \[3\], rank \d issues .*float"),
    "kinds": (*differently(reducing(3), gathering), r"all_(reduce \(SUM\)|gather of parts) of .*, rank \d issues all_"),
    "number of operations": (*differently(together(2), together(3)), r"\[3\]; all_reduce \(SUM\) of float32 \[3\]"),
    "gaps": (*differently(*[lambda group: dist.all_reduce(torch.ones(4, 4).t()[1:], group=group)] * 2), "with gaps"),
    "part": (
        *differently(*[lambda group: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2), group=group)] * 2),
        "a part of 2 elements for places of 5",
    ),
}  # fmt: skip


def broken(name):
    timing, program, _ = BROKEN[name]
    emulated_mesh(timing, data=2)
    try:
        program(dist.new_group([0, 1], backend="emulated_nccl"))
    except BrokenRule as error:
        return str(error)
    finally:
        TIMING.open.clear()
        TIMING.unread.clear()
    return "nothing was found"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name):
    said = on_ranks(2, broken, name)
    for each in said:
        assert re.search(BROKEN[name][2], each), said


def messages_of_other_sizes():
    """A message that fits its receiver's room not: what the receiver says."""
    emulated_mesh("latest", data=2)
    group = dist.new_group([0, 1], backend="emulated_nccl")
    work = message(3 + dist.get_rank())(group)
    try:
        work.wait()
    except BrokenRule as error:
        return str(error)
    return ""


def test_messages_of_other_sizes_are_found():
    _, said = on_ranks(2, messages_of_other_sizes)
    assert "message 0 from rank 0 to rank 1: rank 1 issues a message of float32 [4], rank 0 issues" in said


def what_holds(timing):
    """What is there before a wait, of two messages with crossed tags, and of launches nobody waited for."""
    emulated_mesh(timing, data=2)
    group = dist.new_group([0, 1], backend="emulated_nccl")
    part, whole = torch.ones(2), torch.zeros(4)
    work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    before, complete = whole.tolist(), work.is_completed()
    work.wait()
    a, b = torch.full((2,), 1.0), torch.full((2,), 2.0)
    move = dist.isend if dist.get_rank() == 0 else dist.irecv
    for work in [move(a, 1 - dist.get_rank(), group=group, tag=5), move(b, 1 - dist.get_rank(), group=group, tag=4)]:
        work.wait()
    dist.all_reduce(torch.ones(3), group=group, async_op=True)
    unfinished = TIMING.unfinished()
    TIMING.read_all()
    TIMING.open.clear()
    return before, complete, whole.tolist(), a.tolist(), b.tolist(), unfinished


@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_what_holds_before_and_after_a_wait(timing):
    for before, complete, after, a, b, unfinished in on_ranks(2, what_holds, timing):
        assert str(before) == str([1.0] * 4 if timing == "earliest" else [float("nan")] * 4)
        assert not complete and after == [1.0] * 4 and (a, b) == ([1.0, 1.0], [2.0, 2.0])
        assert unfinished == ["collective 1 of ranks [0, 1]: all_reduce (SUM) of float32 [3]"]


def waits_left_out():
    """A store whose gathers nobody waits for."""
    finish = CoalescedAllGatherHandle.finish
    CoalescedAllGatherHandle.finish = lambda self: None
    try:
        wrong = gradients_match({"data": 2}, FEW[:1], ("parameters",), True, mesh_timed("latest"))
    except (BrokenRule, RuntimeError) as error:
        return str(error)
    finally:
        CoalescedAllGatherHandle.finish = finish
    return wrong


def test_a_store_that_does_not_wait_is_found():
    assert all(on_ranks(2, waits_left_out))
    drop(2)
