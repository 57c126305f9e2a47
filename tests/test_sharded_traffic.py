"""Anyone's module, stored by level: what travels, what lives and for how long, by formula (C2, C7–C12, C14, C18)."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwright as sw
from shardwright.params import parameter_group
from shardwright.params.schedule import InFlightError
from shardwright.simulate.rehearsal import stage
from shardwright.trace import Alloc, Op
from shardwright.trace.events import POINTS
from support import dense
from support.marks import slow_in
from support.nets import (
    CASES,
    LEVELS,
    UNIT,
    Case,
    Chain,
    Losses,
    batches_of,
    counts,
    make,
    mesh_and_levels,
    most,
    record_steps,
    recorded,
)
from support.ranks import on_ranks
from support.reference import assert_same


@pytest.mark.parametrize("world", [2, 4])
def test_a_large_gradient_is_reduced_from_its_own_storage(world):
    """Beside it: its part, and two parts for arrivals. Nothing else of more than the activations' size is made."""
    chain = {"count": 3}
    for trace, behind, of in on_ranks(world, recorded, {"data": world}, "gradients", chain):
        assert behind == of == 3 * UNIT // world
        born = [trace.storages[e.storage] for e in trace.events if isinstance(e, Alloc) and e.phase == "backward"]
        large = [s for s in born if s.bytes > UNIT // world]
        assert [(s.category, s.op) for s in large] == [("unreduced", "aten.mm.default")] * 6
        scratch = [s for s in born if s.bytes == UNIT // world and s.category != "gradient"]
        assert len(scratch) == 6 * min(2, world - 2)
        assert {s.bytes for s in born} <= {UNIT, UNIT // world, 4, 2 * 64 * 4}


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_collectives_of_a_chain(in_flight):
    """U units, each of two tensors: gathered again U + (U−1), kept U; in the later steps, which prefetch, too."""
    chain = {"count": 5, "width": 8, "bias": True}
    expected = {
        "replicate": {"all_reduce": 5},
        "optimizer": {"all_gather": 5, "reduce_scatter": 5},
        "gradients": {"all_gather": 5, "reduce_scatter": 5},
        "parameters": {"all_gather": 9, "reduce_scatter": 5},
        "kept": {"all_gather": 5, "reduce_scatter": 5},
    }
    for level, count in expected.items():
        for trace, _, _ in on_ranks(2, recorded, {"data": 2}, level, chain, {"in_flight": in_flight}, 3):
            assert [counts(trace, step) for step in (1, 2, 3)] == [count] * 3, level
            ahead = [c for c in trace.collectives if c.kind == "all_gather" and c.step == 3 and c.mode == "async"]
            if level == "parameters":
                assert len(ahead) == (0 if in_flight == 1 else 4 + 4)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_no_more_units_live_than_stated(in_flight):
    """As many as stated, once their order is known; and neither that nor unreduced gradients grow with the depth."""
    transient = []
    for count in (5, 10):
        for trace, _, _ in on_ranks(2, recorded, {"data": 2}, "parameters", {"count": count}, {"in_flight": in_flight}):
            assert most(trace, ("gathered",), 1) == UNIT
            assert most(trace, ("gathered",), 2) == in_flight * UNIT
            transient.append([most(trace, ("gathered", "unreduced", "bucket"), step) for step in (1, 2)])
    assert transient == [transient[0]] * 4
    assert max(transient[0]) <= (in_flight + 2) * UNIT


BLOCK = {"count": 4, "hidden": 256, "dtype": torch.bfloat16}


def test_communication_peak_of_blocks():
    """Four blocks of 98,304 B: of gathered weights and unreduced gradients at most three blocks' worth."""
    for trace, _, _ in on_ranks(2, recorded, {"data": 2}, "parameters", BLOCK, None, 3, 2, torch.bfloat16):
        assert max(most(trace, ("gathered", "unreduced", "bucket"), step) for step in (1, 2, 3)) <= 3 * 98_304


def test_the_transient_of_hybrid_sharding_does_not_grow_with_the_depth():
    """bf16 products of fp32 parameters over 2 × 2 ranks: the fp32 parts of sums are the gradients, nothing beside."""
    found = []
    for count in (3, 6):
        args = ({"replica": 2, "shard": 2}, "parameters", {"count": count}, {"dtype": torch.bfloat16})
        for trace, behind, of in on_ranks(4, recorded, *args, 2, 2, torch.bfloat16):
            assert behind == of == count * UNIT // 2
            transient = ("gathered", "unreduced", "bucket", "temporary")
            found.append([most(trace, transient, step) for step in (1, 2)])
    assert found == [found[0]] * 8


def accumulated(level, unsynchronised):
    """(bytes of gradients after each of two micro-batches, the largest error against one big batch)."""
    mesh = dense.mesh_of(data=2)
    model = sw.shard(Chain(2, 8, dtype=torch.float64), mesh, level)
    xs = [dense.random(2, 8, seed=10 * place + micro) for place in range(2) for micro in range(2)]
    mine = xs[2 * dist.get_rank() :][:2]
    held = []
    with sw.record(model) as trace:
        with sw.no_sync(model) if unsynchronised else model.parameter_store.schedule.reductions.accumulate():
            model(mine[0]).square().sum().backward()
        torch.zeros(1)  # the recorder notices the end of backward
        model(mine[1]).square().sum().backward()
    held = [p.categories["gradient"] for p in trace.points if p.name == "after backward"]
    whole = Chain(2, 8, dtype=torch.float64)
    whole(torch.cat(xs)).square().sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return held, max(dense.error(a.grad.full_tensor(), b.grad) for a, b in pairs)


@pytest.mark.parametrize(
    ("level", "unsynchronised", "held"),
    [
        ("replicate", False, [2, 2]),
        ("optimizer", False, [2, 1]),
        ("gradients", False, [1, 1]),
        ("parameters", False, [1, 1]),
        ("parameters", True, [2, 1]),
    ],
)
def test_accumulation_with_and_without_synchronisation(level, unsynchronised, held):
    """C14. Two linears of 8 × 8 over 2 ranks: what is reduced once a step, or not yet, is held whole in between."""
    for found, error in on_ranks(2, accumulated, level, unsynchronised):
        assert found == [each * 8 * 8 * 8 for each in held]
        assert error <= 1e-12


def small_and_large(level, unsynchronised):
    """.grad after micro-batches whose bf16 gradients are 1 and 2⁻⁹ (on one rank; 0 on the others)."""
    model = nn.Linear(1, 1, bias=False)
    sw.shard(model, dense.mesh_of(data=dist.get_world_size()), level, dtype=torch.bfloat16)
    for number, value in enumerate((1.0, 2.0**-9)):
        hold = unsynchronised and number == 0
        with sw.no_sync(model) if hold else nullcontext():
            x = torch.full((1, 1), value * (dist.get_rank() == 0), dtype=torch.bfloat16)
            model(x).sum().backward()
    return model.weight.grad.full_tensor().item()


@pytest.mark.parametrize("level", ["replicate", "optimizer", "gradients", "parameters"])
def test_micro_batches_add_up_in_float32(level):
    """C14: 1 + 2⁻⁹ would be 1 in bfloat16."""
    for unsynchronised in (False, True):
        assert on_ranks(2, small_and_large, level, unsynchronised) == [1.001953125] * 2


class Mixed(nn.Module):
    """A frozen linear in bf16 with fp32 adapters."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(4, 64)), nn.Parameter(torch.ones(64, 4))

    def forward(self, x):
        return self.base(x.bfloat16()).float() + x @ self.a.T @ self.b.T


def mixed_bytes(level):
    model = sw.shard(nn.Sequential(Mixed(), Mixed()), dense.mesh_of(data=dist.get_world_size()), level)
    model(torch.ones(2, 64)).sum().backward()
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    return sum(g.untyped_storage().nbytes() for g in grads), {g.dtype for g in grads}


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_and_trainable_parameters_of_two_element_types(world):
    for held, dtypes in on_ranks(world, mixed_bytes, "parameters"):
        assert held == 2 * 2_048 // world
        assert dtypes == {torch.float32}


# -- errors, leaks, what costs nothing -------------------------------------------------------------------------------


def asked_too_much(units):
    model = sw.shard(make(Case()), dense.mesh_of(data=2), groups=units, in_flight=1)
    with pytest.raises(InFlightError) as caught:
        model(torch.zeros(1, 1, dtype=torch.int64))
    return str(caught.value)


def test_more_groups_than_stated_is_an_error_that_names_the_group():
    for message in on_ranks(2, asked_too_much, ("blocks.*", "blocks.*.mlp")):
        assert message.startswith("blocks.0.mlp is asked for while blocks.0 are gathered; in_flight states 1. ")
        assert "\n" not in message


def leaks(axes):
    """What of a model lives on after ``del``; the process groups after each of five builds."""
    mesh, levels = mesh_and_levels(axes)
    alive, groups = [], []
    for _ in range(5):
        case = CASES["everything"]
        model = sw.shard(make(case), mesh, bucket="1MiB", **levels["parameters"])
        loss = Losses(model, case)(batches_of(case, dist.get_rank(), 0, torch.float64))
        loss.backward()
        del loss
        store = model.parameter_store
        references = [weakref.ref(each) for each in (model, store, store.schedule, *store.schedule.param_groups)]
        references += [weakref.ref(each) for each in model.parameters()]
        del model, store
        gc.collect()
        alive += [reference() for reference in references if reference() is not None]
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return [type(each).__name__ for each in alive], groups


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 8}, {"replica": 2, "shard": 2}])
def test_nothing_outlives_the_model(axes):
    for alive, groups in on_ranks(torch.Size(axes.values()).numel(), leaks, axes):
        assert alive == []
        assert groups == groups[:1] * 5


def cost_of_one(level):
    model = sw.shard(Chain(3, bias=True), dense.mesh_of(data=1), **LEVELS[level])
    plain = Chain(3, bias=True)
    return [record_steps(each, torch.ones(2, 64), 2)[0] for each in (model, plain)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_shard_group_of_one_costs_nothing(level):
    """No collective, no copy, not a byte more than the plain module's at any peak."""
    ((ours, plain),) = on_ranks(1, cost_of_one, level)
    assert ours.collectives == ()
    assert ours.phase_peaks == plain.phase_peaks
    copies = {"aten.copy_.default", "aten.clone.default", "aten._to_copy.default"}
    assert not copies & {event.name for event in ours.events if isinstance(event, Op)}


class OnGrid(nn.Module):
    """A norm that sees tokens split over both axes, and two linears whose features are split over one of them."""

    def __init__(self, mesh, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up, self.down = (nn.Linear(*shape, dtype=torch.float64) for shape in ((8, 12), (12, 8)))
        nn.init.normal_(self.norm.weight)
        if mesh is not None:
            column = sw.GridLayout(m=("data",), n=("tensor",), x="sharded", save_x="shard")
            row = sw.GridLayout(m=("data",), k=("tensor",), y="sharded")
            self.up = sw.GridLinear.from_dense(self.up, column, mesh, f"{seed}.up")
            self.down = sw.GridLinear.from_dense(self.down, row, mesh, f"{seed}.down")

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def on_two_meshes(data):
    """(errors, the most reductions alive in one group, the sizes of the groups)."""
    mesh = dense.mesh_of(data=data, tensor=2)
    model = nn.Sequential(*(OnGrid(mesh, seed) for seed in range(4)))
    plain = nn.Sequential(*(OnGrid(None, seed) for seed in range(4)))
    placements = model[0].up.input_placements
    model = sw.shard(model, mesh, "parameters")
    travelling, alive, kind = {}, {}, parameter_group.CoalescedReduceScatterHandle

    class Watched(kind):
        def __init__(self, pairs, group, *rest):
            living = [each for each in travelling.get(group.ranks, []) if any(ref() is not None for ref in each)]
            living.append([weakref.ref(whole.untyped_storage()) for whole, _ in pairs])
            travelling[group.ranks] = living
            alive[group.ranks] = max(alive.get(group.ranks, 0), len(living))
            super().__init__(pairs, group, *rest)

    x, up = dense.random(16, 8, seed=1), dense.random(16, 8, seed=2)
    parameter_group.CoalescedReduceScatterHandle = Watched
    try:
        y = model(dense.part(x, mesh, placements))
        y.backward(dense.part(up, mesh, placements))
    finally:
        parameter_group.CoalescedReduceScatterHandle = kind
    plain(x).backward(up)
    errors = {
        name: dense.error(ours.grad.full_tensor(), theirs.grad)
        for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True)
    }
    return errors, max(alive.values()), sorted(len(ranks) for ranks in alive)


def test_two_meshes_in_a_unit_hold_one_reduction_a_group():
    for data in (2, 4):
        for errors, alive, groups in on_ranks(2 * data, on_two_meshes, data):
            assert max(errors.values()) <= 1e-12, errors
            assert alive == 1
            assert groups == [data, 2 * data]


# -- memory, and its rehearsal ---------------------------------------------------------------------------------------


def expected_memory(level, ranks, iteration, point, units=3, unit=4 * 8 * 8, row=4 * 2 * 8):
    """Bytes by category at a ledger point of a chain of linears, each a unit, on two rows."""
    whole = units * unit
    stored = whole if level == "replicate" else whole // ranks
    begun = iteration > 1 or point != "start"
    stepped = iteration > 1 or point in ("after step", "done")
    between = point in ("after forward", "after loss")
    resident = whole if level in ("optimizer", "gradients") and begun else 0
    # The last unit, or all, stays for backward; the graph holds none of it.
    gathered = {"parameters": unit, "kept": whole}.get(level, 0)
    return {
        "parameter": stored + resident,
        "buffer": 0,
        "input": row if begun else 0,
        "gradient": stored if point in ("after backward", "after step") else 0,
        "optimizer": 2 * stored + 4 * units if stepped else 0,  # two moments, and one count of steps a parameter
        "saved": (units - 1) * row if between else 0,  # the inputs of all linears but the first
        "gathered": gathered if between else 0,
        "unreduced": 0,
        "bucket": 0,
        "temporary": {"after forward": row, "after loss": 4 + 4}.get(point, 0),  # the output; the loss, its gradient
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_memory_by_formula(level, world):
    """Four iterations × six points, to the byte."""
    chain = {"count": 3, "width": 8}
    for trace, _, _ in on_ranks(world, recorded, {"data": world}, level, chain, None, 4):
        assert len(trace.points) == 4 * 6
        for place, point in enumerate(trace.points):
            assert (point.step, point.name) == (place // 6 + 1, POINTS[place % 6])
            expected = expected_memory(level, world, point.step, point.name)
            assert point.categories == expected, (point.step, point.name)
            assert point.total == sum(expected.values())
        assert trace.saved_bytes == 4 * 2 * 8 + max(point.categories["saved"] for point in trace.points)


def record_net(mesh, case, level):
    model = sw.shard(make(case, torch.float32), mesh, groups=case.groups, in_flight=case.in_flight, **LEVELS[level])
    return record_steps(model, torch.zeros(2, 3, dtype=torch.int64), 2)[0]


def record_nets(axes, cases, level):
    return [record_net(dense.mesh_of(**axes), case, level) for case in cases]


@pytest.mark.parametrize("level", slow_in(["replicate", "optimizer"], LEVELS))
def test_a_rehearsal_is_the_run(level):
    cases = [Case(tied=True, frozen=("blocks.0",), recompute="around"), CASES["recomputed inside, root kept"]]
    axes = {"data": 2}
    for rank, traces in enumerate(on_ranks(2, record_nets, axes, cases, level)):
        with stage(SimpleNamespace(mesh=axes, world_size=2, backend="gloo"), rank) as mesh, FakeTensorMode():
            for case, real in zip(cases, traces, strict=True):
                assert_same(record_net(mesh, case, level), real)
