"""Buckets inside the parameter store: what goes through them, how often, and that they leave nothing (C1–C8, C14)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.comm import exchange
from shardwright.models.config import load_config
from shardwright.params.stored import StoredParameter
from shardwright.simulate.rehearsal import rehearse
from shardwright.stretching.bucket_period import cap_of
from shardwright.trace import Free, Op
from support import dense, nets, tiny
from support.marks import slow_at
from support.nets import CASES, FEW, LEVELS, counts, gradients_match, record_steps
from support.ranks import on_ranks
from support.reference import assert_same

CAP = 2**13
BUCKETED = {f"{name}, bucket": words | {"bucket": CAP} for name, words in LEVELS.items()}


def bucketed(axes, names, poison):
    """As ``gradients_match``, with a bucket at every level."""
    nets.LEVELS.update(BUCKETED)
    try:
        return gradients_match(axes, names, tuple(BUCKETED), poison)
    finally:
        for name in BUCKETED:
            del nets.LEVELS[name]


@pytest.mark.parametrize(
    ("axes", "names", "poison"),
    slow_at(
        (2, 3, 5),
        [
            ({"data": 1}, FEW[3:], False),
            ({"data": 2}, tuple(CASES), True),
            ({"data": 3}, FEW, False),
            ({"replica": 2, "shard": 2}, FEW, False),
            ({"data": 4}, ("adapters",), False),
            ({"data": 8}, ("adapters", "everything"), False),
        ],
    ),
    ids=["1", "2", "3", "2x2", "4", "8"],
)
def test_gradients_through_buckets_equal_dense(axes, names, poison):
    """A8 with adapters among them; two backwards each, so what one leaves shows in the next."""
    for wrong in on_ranks(torch.Size(axes.values()).numel(), bucketed, axes, names, poison):
        assert wrong == {}


class Normed(nn.Sequential):
    """``count`` blocks: a norm (two vectors of ``width``) and a linear of ``width`` × ``width`` with its bias."""

    def __init__(self, count, width):
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(count)))


def run_normed(level, count, width, cap, steps=2):
    model = sw.shard(Normed(count, width), dense.mesh_of(data=dist.get_world_size()), level, bucket=cap)
    return record_steps(model, torch.randn(3, width), steps)


def greedy(sizes, room):
    """How many bins of ``room`` bytes sizes fill, in order."""
    bins, left = 0, 0
    for size in sizes:
        if size > left:
            bins, left = bins + 1, room
        left -= size
    return bins


def reductions(caps):
    """For each cap: whether gradients own just their bytes, and (module, bytes) of the second step's reductions."""
    found = []
    for cap in caps:
        trace, behind, of = run_normed("parameters", 6, 48, cap)
        moves = [(c.module, c.size) for c in trace.collectives if c.kind == "reduce_scatter" and c.step == 2]
        found.append((behind == of, moves))
    return found


def test_c1_small_gradients_share_and_large_ones_do_not():
    """Linears of 48 × 48 (9,216 B) travel by themselves; vectors (192 B) by bins of cap/2, in order of arrival."""
    caps = (2**10, 2**12, 2**14)
    for world in (2, 3, 4, 8):
        padded = world * -(-48 // world) * 4
        for answers in on_ranks(world, reductions, caps):
            for cap, (owned, moves) in zip(caps, answers, strict=True):
                assert owned
                shared = [size for module, size in moves if module == "bucket"]
                assert len(moves) - len(shared) == 6
                assert len(shared) == greedy([padded] * 18, cap // 2)
                assert sum(shared) == 18 * padded


def test_c3_no_byte_outside_of_backward_and_c4_within_the_cap():
    for world in (1, 2, 3, 4, 8):
        for level in ("replicate", "parameters"):
            for trace, _, _ in on_ranks(world, run_normed, level, 8, 48, 2**11):
                assert all(point.categories["bucket"] == 0 for point in trace.points)
                most = nets.most(trace, ("bucket",), 2)
                assert (0 < most <= 2**11 * (world + 1) // world) if world > 1 else most == 0


def test_norms_of_all_blocks_are_reduced_in_few_operations():
    """Without a bucket each unit's vectors travel with its matrix; with one, 18 vectors are one operation."""
    for world in (1, 2, 3, 4, 8):
        for cap, expected in ((0, {"all_reduce": 6}), ("1MiB", {"all_reduce": 1})):
            for trace, _, _ in on_ranks(world, run_normed, "replicate", 6, 48, cap):
                assert counts(trace, 2) == (expected if world > 1 else {})


def awaited_at_deposits(cap):
    """How many arrivals are waited for where a gradient is deposited, in a backward of 6 norms and linears."""
    deposit, depositing, found = StoredParameter.deposit, [], []

    def watched(self, *args):
        depositing.append(self)
        deposit(self, *args)
        depositing.pop()

    def waited(self):
        found.extend(depositing)
        advance(self)

    advance = exchange.ReduceScatterHandle.advance
    with (
        mock.patch.object(StoredParameter, "deposit", watched),
        mock.patch.object(exchange.ReduceScatterHandle, "advance", waited),
    ):
        run_normed("parameters", 6, 48, cap, 1)
    return len(found)


def test_small_gradients_do_not_wait_for_what_travels():
    """On 3 ranks all arrivals have room at once; on 8 there are 7, of which 3 have, and 4 launches may take in some."""
    assert on_ranks(3, awaited_at_deposits, 0) == [0] * 3
    for awaited in on_ranks(8, awaited_at_deposits, 0):
        assert 0 < awaited <= 6 * 4 * 4


@pytest.mark.slow
def test_in_a_plan_a_bucket_trains_alike_and_is_rehearsed_and_a_unit_may_stay_out():
    """B2: norm weights are partial over data and tensor: scattered over one, parts summed over the other, fused."""
    axes = {"data": 2, "tensor": 2}
    params = {"model.norm": {"level": "parameters", "bucket": 0}, "*": "parameters"}
    plan = tiny.plan_of(axes, "sequence-parallel", params=params, bucket="32KiB")
    reference = on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate"), 3)[0][0]
    for rank, (losses, real) in enumerate(on_ranks(4, tiny.train, plan, 3, 2)):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
        if rank in (0, 3):
            assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)
        found = [(c.kind, c.module, c.axes) for c in real.collectives if c.step == 2 and c.phase == "backward"]
        assert ("reduce_scatter", "model.norm", ("data",)) in found
        assert ("all_reduce", "bucket", ("tensor",)) in found
        assert len([kind for kind, _, of in found if kind == "all_reduce" and of == ("tensor",)]) == 2


def test_what_a_bin_brings_goes_on_at_once_and_lands_while_backward_runs():
    """Of norms a block fills a bin: each bin that has travelled over data is one message over tensor.

    And where gradients add up over micro-batches, the second one's small parts are gone before its backward ends.
    """
    path = tiny.config_path(num_hidden_layers=6)
    axes, params = {"data": 2, "tensor": 2}, {"*": "gradients"}
    plan = tiny.plan_of(axes, "sequence-parallel", path, params=params, accumulation=2)
    plan = plan.evolve(bucket=cap_of(load_config(path), plan, 1))
    for rank, (_, real) in enumerate(on_ranks(4, tiny.train, plan, 2, 2, path)):
        if rank in (0, 3):
            assert_same(rehearse(path, plan, rank=rank), real)
        moves = [c.axes for c in real.collectives if c.step == 2 and c.module == "bucket"]
        assert moves.count(("data",)) == moves.count(("tensor",)) == 2 * 7, "six blocks and the last norm"
        assert moves[:4] == [("data",), ("tensor",)] * 2
        part = load_config(path).hidden_size // 2 * 4
        assert freed_before_the_end(real, part) == 10, "two of each bin but the last two"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_what_a_full_bin_becomes_has_room_in_a_bin_whatever_its_type(backend, reduce_dtype):
    """bfloat16 norms, of which each is a fourth of the cap as it travels, and parts of them in float32."""
    path = tiny.config_path(num_hidden_layers=6)
    params = {"*": {"level": "gradients", "reduce_dtype": reduce_dtype}}
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", path, params=params, backend=backend)
    plan = plan.evolve(dtype="bfloat16", master_dtype="float32")
    plan = plan.evolve(bucket=cap_of(load_config(path), plan, 1))
    moves = [c for c in rehearse(path, plan).collectives if c.step == 2 and c.module == "bucket"]
    for axes in (("data",), ("tensor",)):
        assert len([c for c in moves if c.axes == axes]) == 7


def freed_before_the_end(trace, size):
    """How many gradients of ``size`` bytes step 2 lets go of before the backward of blocks is over."""
    places = {place: event for place, event in enumerate(trace.events) if (event.step, event.phase) == (2, "backward")}
    at_work = [p for p, e in places.items() if isinstance(e, Op) and e.module.startswith("model.layers.")]
    freed = [e.storage for p, e in places.items() if isinstance(e, Free) and p < at_work[-1]]
    gone = [trace.storages[number] for number in freed]
    return len([storage for storage in gone if (storage.category, storage.bytes) == ("gradient", size)])


def test_ranks_that_a_tensor_axis_gives_unequal_parts_decide_alike():
    """Of gate and up one rank holds 73 rows, the other 72: a cap between their limits makes neither small.

    What else they do stands at the same points, or they would wait for each other.
    """
    path = tiny.config_path(intermediate_size=145)
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", path, params={"*": "parameters"}, bucket=112_000)
    sequences = [
        [(c.kind, c.axes, c.module) for c in trace.collectives if c.module != "bucket"]
        for _, trace in on_ranks(4, tiny.train, plan, 2, 2, path)
    ]
    assert sequences == [sequences[0]] * 4


def aborted():
    """The largest error of gradients after a backward that an exception ended, with a bucket half full."""
    case = CASES["root kept"]
    rank = dist.get_rank()
    model = sw.shard(nets.make(case), dense.mesh_of(data=2), groups=case.groups, bucket=CAP)
    losses = nets.Losses(model, case)
    hook = model.blocks[0].register_full_backward_pre_hook(nets.fail)
    try:
        losses(nets.batches_of(case, rank, 1, torch.float64)).backward()
    except Exception:
        pass
    else:
        raise AssertionError("nothing was raised")
    hook.remove()
    model.zero_grad()
    losses(nets.batches_of(case, rank, 0, torch.float64)).backward()
    worst = nets.worst(model, nets.dense_gradients(case, 2, 0))
    return max(worst.values()), sw.Runtime.of(dense.mesh_of(data=2)).arena.held


def test_c7_an_aborted_backward_leaves_nothing_in_the_bucket():
    for error, held in on_ranks(2, aborted):
        assert error <= 1e-12 and held == 0


def unsynchronised(level):
    """(error of the gradients of two micro-batches, the first under no_sync; how many reductions they took)."""
    mesh = dense.mesh_of(data=dist.get_world_size())
    x = [torch.randn(3, 48, generator=torch.Generator().manual_seed(i)) for i in range(2 * mesh.size())]
    model = sw.shard(Normed(3, 48), mesh, level, bucket="64KiB")
    mine = x[2 * dist.get_rank() :][:2]
    with sw.record(model) as trace:
        with sw.no_sync(model):
            model(mine[0]).square().sum().backward()
        model(mine[1]).square().sum().backward()
    whole = Normed(3, 48)
    for each in x:
        whole(each).square().sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    error = max(dense.error(a.grad.full_tensor(), b.grad) / b.grad.abs().max().item() for a, b in pairs)
    return error, len([c for c in trace.collectives if c.kind != "all_gather"])


def test_c14_what_is_put_by_goes_through_the_bucket_at_last():
    """All gradients together are smaller than a bin."""
    for world in (1, 2, 3, 4, 8):
        for level in ("replicate", "optimizer", "parameters"):
            for error, reductions in on_ranks(world, unsynchronised, level):
                assert error <= 1e-5 and reductions == (world > 1)
