"""A Hugging Face Llama under every layout: gradients, curves, and rehearsal against reality (ACCEPTANCE B2, D1, F1)."""

from __future__ import annotations

import functools

import pytest
import torch

import shardwright as sw
from shardwright.simulate.rehearsal import rehearse
from shardwright.step.train_step import record_steps
from support import tiny
from support.marks import slow_where
from support.ranks import on_ranks
from support.reference import against_hugging_face, assert_same

MESHES = [
    ({"data": 1, "tensor": 1}, "sequence-parallel"),
    ({"data": 2, "tensor": 1}, "replicate"),
    ({"data": 3, "tensor": 1}, "replicate"),
    ({"data": 4, "tensor": 1}, "replicate"),
    *(
        (axes, layout)
        for axes in (
            {"data": 1, "tensor": 2},
            {"data": 1, "tensor": 3},
            {"data": 1, "tensor": 4},
            {"data": 2, "tensor": 2},
        )
        for layout in (
            "tensor-all-reduce",
            "sequence-parallel",
            "sequence-parallel-keep",
            "sequence-parallel-async",
            "sequence-parallel-ring",
        )
    ),
]
NAMES = [f"{axes['data']}x{axes['tensor']}-{layout}" for axes, layout in MESHES]


@pytest.mark.parametrize(("axes", "layout"), slow_where(lambda axes, _: axes["tensor"] > 2, MESHES), ids=NAMES)
def test_loss_and_every_gradient_equal_the_unmodified_model(axes, layout):
    """B2 among them: the norm weights' gradients, on every rank, with tokens split over data and tensor axes."""
    for errors in on_ranks(axes["data"] * axes["tensor"], against_hugging_face, tiny.config_path(), axes, layout):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("layout", ["tensor-all-reduce", "sequence-parallel", "sequence-parallel-keep"])
def test_the_same_with_tied_weights(layout):
    path, axes = tiny.config_path(tie_word_embeddings=True), {"data": 2, "tensor": 2}
    for errors in on_ranks(4, against_hugging_face, path, axes, layout):
        assert max(errors.values()) <= 1e-12, errors


@functools.cache
def single_rank_curve():
    return on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate"), 20)[0][0]


@pytest.mark.parametrize(
    ("axes", "layout"),
    slow_where(lambda axes, layout: axes["tensor"] > 1 and (axes["data"] == 1 or layout.endswith("keep")), MESHES),
    ids=NAMES,
)
def test_f1_same_curve_and_d1_rehearsal_equals_reality(axes, layout):
    plan = tiny.plan_of(axes, layout)
    runs = on_ranks(plan.world_size, tiny.train, plan, 20, 2)
    reference = single_rank_curve()
    assert reference[-1] < 0.9 * reference[0]  # it learns something, or equal curves say little
    for rank, (losses, real) in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
        if rank in (0, plan.world_size - 1):
            assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)


@functools.cache
def recomputed_curve():
    return single_rank_curve()[:4]


@pytest.mark.parametrize(
    "layout",
    slow_where(
        lambda layout: layout != "sequence-parallel",
        ["sequence-parallel", "sequence-parallel-keep", "sequence-parallel-async", "sequence-parallel-ring"],
    ),
)
def test_recomputed_blocks_train_alike_hold_less_and_are_rehearsed(layout):
    plan = tiny.plan_of({"data": 2, "tensor": 2}, layout)
    whole = rehearse(tiny.config_path(), plan)
    for recompute in ({"*": "block"}, {"model.layers.1": "block"}):
        again = plan.evolve(recompute=recompute)
        for rank, (losses, real) in enumerate(on_ranks(4, tiny.train, again, 4, 2)):
            assert max(abs(a - b) / b for a, b in zip(losses, recomputed_curve(), strict=True)) <= 1e-5
            if rank in (0, 3):
                assert_same(rehearse(tiny.config_path(), again, rank=rank), real)
            assert real.saved_bytes < whole.saved_bytes


@pytest.mark.parametrize("layout", ["replicate", "sequence-parallel"])
def test_accumulation_equals_one_big_batch(layout):
    axes = {"data": 2, "tensor": 2} if layout != "replicate" else {"data": 4, "tensor": 1}
    plan = tiny.plan_of(axes, layout, micro_batch=4, accumulation=3)
    runs = on_ranks(4, tiny.train, plan, 4, 2)
    big = on_ranks(1, accumulated_as_one, 4)[0]
    for rank, (losses, real) in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, big, strict=True)) <= 1e-5
        if rank in (0, 3):
            assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)


def accumulated_as_one(steps):
    """The three micro-batches of each step as one batch, on one rank."""
    axes = {"data": 1, "tensor": 1}
    plan = tiny.plan_of(axes, "replicate", micro_batch=12)
    model, mesh = tiny.build(plan)
    step = sw.TrainStep(model, mesh, plan, learning_rate=3e-3)
    data = tiny.batches(tiny.plan_of(axes, "replicate", micro_batch=4, accumulation=3), steps)
    return [step([tuple(torch.cat(part) for part in zip(*micro, strict=True))]).item() for micro in data]


def test_the_arena_that_a_rehearsal_states_is_enough_and_one_slot_less_is_not():
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel")
    slots = rehearse(tiny.config_path(), plan).arena
    on_ranks(4, tiny.train, plan.evolve(arena=slots), 2)
    for smaller in ({k: v[:-1] for k, v in slots.items()}, {k: [b - 1 for b in v] for k, v in slots.items()}):
        with pytest.raises(AssertionError, match=r"[\w.]+ \((X|Y|dX|dY)\) asks for \d+ B of float32"):
            on_ranks(4, tiny.train, plan.evolve(arena=smaller), 1)


def test_bfloat16_rehearsal_equals_reality():
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", dtype="bfloat16")
    for rank, (losses, real) in enumerate(on_ranks(4, tiny.train, plan, 2, 2)):
        assert losses[0] == pytest.approx(single_rank_curve()[0], rel=0.02)
        assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)


def profiled_peak():
    """Bytes above the start at the peak: torch.profiler's and the recorder's, over the same two steps."""
    plan = tiny.plan_of({"data": 1, "tensor": 1}, "replicate")

    def fresh():
        model, mesh = tiny.build(plan)
        return sw.TrainStep(model, mesh, plan), tiny.batches(plan, 2)

    step, data = fresh()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        losses = [step(micro) for micro in data]
    assert len(losses) == 2
    total = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    step, data = fresh()
    _, trace = record_steps(step, data)
    # The batches were there before the profiler started; the recorder sees them when they are first used.
    return peak, max(p.total - p.categories["input"] for p in trace.peaks) - trace.points[0].total


def test_d1_one_rank_equals_the_profiler():
    ((profiled, recorded),) = on_ranks(1, profiled_peak)
    assert profiled == recorded


def test_gather_again_saves_exactly_what_the_formula_says():
    """Against keep: (sites that gather)·(1−1/n)·T·h·e bytes less; sites that gather: 2 a block and the head."""
    for data, tensor in ((1, 2), (1, 4), (2, 2)):
        axes = {"data": data, "tensor": tensor}
        keep = rehearse(tiny.config_path(), tiny.plan_of(axes, "sequence-parallel-keep"))
        again = rehearse(tiny.config_path(), tiny.plan_of(axes, "sequence-parallel"))
        tokens = tiny.BATCH // data * tiny.SEQUENCE
        sites = 2 * tiny.FIELDS["num_hidden_layers"] + 1
        whole = tokens * tiny.FIELDS["hidden_size"] * 4
        assert keep.saved_bytes - again.saved_bytes == sites * (whole - whole // tensor)


def interleaved_and_dropped():
    """A forward whose graph is dropped, then an aborted backward, change nothing about the next step's gradients."""
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel")
    model, mesh = tiny.build(plan)
    ((ids, labels),) = tiny.batches(plan, 1, mesh.get_local_rank("data"))[0]

    def gradients():
        model(input_ids=ids, labels=labels, shift_labels=labels).loss.backward()
        found = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    expected = gradients()
    model(input_ids=ids, labels=labels, shift_labels=labels)
    with torch.no_grad():
        model(input_ids=ids)
    with torch.inference_mode():
        model(input_ids=ids)

    def fail(grad):
        raise KeyError("stop here")

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("stop here")

    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: Fault.apply(output))
    try:
        model(input_ids=ids, labels=labels, shift_labels=labels).loss.backward()
        raise AssertionError("the fault did not show")
    except KeyError:
        pass
    hook.remove()
    model.zero_grad()
    after = gradients()
    assert sw.Runtime.of(mesh).arena.held == 0
    return all(torch.equal(expected[name], after[name]) for name in expected)


def test_dropped_graphs_and_aborted_backwards_leave_nothing():
    assert all(on_ranks(4, interleaved_and_dropped))


@pytest.mark.parametrize(
    ("axes", "changes", "settings", "words"),
    [
        ({"data": 1, "tensor": 5}, {}, {}, "heads of model.layers.0.self_attn.q_proj is 12"),
        ({"data": 1, "tensor": 4}, {"num_key_value_heads": 6}, {}, "heads of model.layers.0.self_attn.k_proj is 6"),
        ({"data": 5, "tensor": 1}, {}, {"micro_batch": 11}, "a batch that divides by data = 5"),
        ({"data": 1, "tensor": 2}, {"model_type": "bloom"}, {}, "model_type"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_one_line(axes, changes, settings, words):
    path = tiny.config_path(**changes)
    with pytest.raises(sw.InputError, match=words) as caught:
        rehearse(path, tiny.plan_of(axes, "sequence-parallel", path, **settings))
    assert "\n" not in str(caught.value) and "allowed:" in str(caught.value)


def test_layouts_that_do_not_join_are_converted():
    axes = {"data": 2, "tensor": 2}
    mixed = {"*.mlp.*": "tensor-all-reduce", "*": "sequence-parallel"}
    for errors in on_ranks(4, against_hugging_face, tiny.config_path(), axes, mixed):
        assert max(errors.values()) <= 1e-12, errors
    whole = {"*.self_attn.o": "replicate", "*": "sequence-parallel"}  # features are gathered on its edge
    for errors in on_ranks(4, against_hugging_face, tiny.config_path(), axes, whole):
        assert max(errors.values()) <= 1e-12, errors
