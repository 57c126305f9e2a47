"""A Hugging Face Llama whose parameters are stored by level: curves, rehearsals, recomputation (C16, D1, F1)."""

from __future__ import annotations

import functools

import pytest

import shardwright as sw
from shardwright.simulate.rehearsal import rehearse
from shardwright.step.train_step import record_steps
from support import tiny
from support.marks import slow_at
from support.ranks import on_ranks
from support.reference import assert_same

LEVELS = {
    "replicate": "replicate",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "parameters": "parameters",
    "kept": {"level": "parameters", "keep": True},
}
DATA, BOTH = {"data": 2, "tensor": 1}, {"data": 2, "tensor": 2}
CASES = [
    *((DATA, "replicate", level) for level in ("optimizer", "gradients", "parameters", "kept")),
    ({"data": 3, "tensor": 1}, "replicate", "parameters"),
    *((BOTH, "sequence-parallel", level) for level in ("optimizer", "gradients", "parameters", "kept")),
    *((BOTH, layout, "parameters") for layout in ("tensor-all-reduce", "sequence-parallel-async")),
    (BOTH, "sequence-parallel-ring", "parameters"),
]
STEPS = 4


@functools.cache
def single_rank_curve(accumulation=1):
    plan = tiny.plan_of({"data": 1, "tensor": 1}, "replicate", accumulation=accumulation)
    return on_ranks(1, tiny.train, plan, STEPS)[0][0]


def assert_trains_alike(plan, tolerance=1e-5, path=None):
    """Losses equal one rank's; the first and the last rank are rehearsed. Returns the first rank's trace."""
    runs = on_ranks(plan.world_size, tiny.train, plan, STEPS, 2)
    reference = single_rank_curve(plan.accumulation)
    for rank, (losses, real) in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= tolerance
        if rank in (0, plan.world_size - 1):
            assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)
    return runs[0][1]


@pytest.mark.parametrize(("axes", "layout", "level"), slow_at((5, 10), CASES))
def test_every_level_trains_alike_and_is_rehearsed(axes, layout, level):
    assert_trains_alike(tiny.plan_of(axes, layout, params={"*": LEVELS[level]}))


def test_recomputed_blocks_on_sharded_parameters():
    plan = tiny.plan_of(BOTH, "sequence-parallel", params={"*": "parameters"}, recompute={"*": "block"})
    assert_trains_alike(plan)


@pytest.mark.parametrize("level", ["replicate", "optimizer", "gradients", "parameters"])
def test_micro_batches_are_reduced_as_often_as_the_level_says(level):
    """Once a step, or in every micro-batch; the same curve, and what is accumulated unreduced is rehearsed too."""
    plan = tiny.plan_of(DATA, "replicate", micro_batch=4, accumulation=3, params={"*": level})
    runs = on_ranks(2, tiny.train, plan, 2, 2)
    reference = on_ranks(1, tiny.train, tiny.plan_of({"data": 1}, "replicate", micro_batch=4, accumulation=3), 2)[0][0]
    for rank, (losses, real) in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
        assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)
    kind = "all_reduce" if level == "replicate" else "reduce_scatter"
    units = 2 + 3  # blocks; embedding, norm, head
    found = [c for c in runs[0][1].collectives if c.kind == kind and c.phase == "backward" and c.step == 2]
    assert len(found) == units * (1 if level in ("replicate", "optimizer") else 3)


def test_bfloat16_on_float32_masters():
    """Masters, gradients and moments are float32; W and what travels are bfloat16."""
    plan = tiny.plan_of(BOTH, "sequence-parallel", dtype="bfloat16", master_dtype="float32", params={"*": "parameters"})
    real = assert_trains_alike(plan, tolerance=0.03)
    whole = tiny.plan_of(BOTH, "sequence-parallel", params={"*": "parameters"})
    sent = {c.module: c.sent for c in rehearse(tiny.config_path(), whole).collectives if c.kind == "reduce_scatter"}
    for collective in real.collectives:
        if collective.kind == "reduce_scatter" and collective.axes == ("data",):
            assert 2 * collective.sent == sent[collective.module]


def test_units_may_be_stored_differently():
    params = {"lm_head": "replicate", "model.layers.0": "optimizer", "*": "parameters"}
    assert_trains_alike(tiny.plan_of(BOTH, "sequence-parallel", params=params))


def test_the_arena_that_a_rehearsal_states_is_enough_and_one_slot_less_is_not():
    plan = tiny.plan_of(DATA, "replicate", params={"*": "parameters"})
    slots = rehearse(tiny.config_path(), plan).arena
    on_ranks(2, tiny.train, plan.evolve(arena=slots), 2)
    smaller = {dtype: sizes[:-1] for dtype, sizes in slots.items()}
    with pytest.raises(AssertionError, match=r"[\w.]+ \((W|packed)\) asks for \d+ B of float32"):
        on_ranks(2, tiny.train, plan.evolve(arena=smaller), 2)


def clipped(plan):
    model, mesh = tiny.build(plan)
    step = sw.TrainStep(model, mesh, plan, learning_rate=3e-3, max_grad_norm=0.05)
    data = tiny.batches(plan, 4, sw.Runtime.of(mesh).group(plan.batch_axes).index)
    losses, trace = record_steps(step, data[:2])
    return [loss.item() for loss in [*losses, *(step(micro) for micro in data[2:])]], trace


def test_c17_clipped_steps_are_those_of_one_rank():
    """Norm weights lie whole over one axis and split over the other; each element counts once."""
    reference = on_ranks(1, clipped, tiny.plan_of({"data": 1, "tensor": 1}, "replicate"))[0][0]
    assert abs(reference[-1] - single_rank_curve()[-1]) > 1e-3  # clipping does something
    for level in ("replicate", "parameters"):
        for losses, trace in on_ranks(4, clipped, tiny.plan_of(BOTH, "sequence-parallel", params={"*": level})):
            assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
            assert [c.kind for c in trace.collectives if c.phase == "step"] == ["all_reduce"] * 2
