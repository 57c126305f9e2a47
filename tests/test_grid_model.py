"""A Llama on grids: gradients, curves, rehearsal against reality (ACCEPTANCE B8, D1, F1), and what is refused."""

from __future__ import annotations

import functools
import itertools

import pytest

import shardwright as sw
from shardwright.families.table import family_of
from shardwright.formulas.conversion import attention_moves
from shardwright.formulas.place import Move
from shardwright.models.config import load_config
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec.mesh import coordinates
from shardwright.spec.site import exchanged_axes
from support import tiny
from support.marks import slow_at, slow_in
from support.ranks import on_ranks
from support.reference import against_hugging_face, assert_same

CUBE = {"i": 2, "j": 2, "l": 2}
GRIDS = [
    (CUBE, "grid-scatter"),
    (CUBE, "grid-reduce"),
    ({"i": 1, "j": 2, "l": 3}, "grid-scatter"),
    ({"i": 2, "j": 3, "l": 1}, "grid-reduce"),
    ({"i": 2, "j": 2}, "grid-2d"),
    ({"i": 2, "d": 2, "j": 2}, "grid-25d"),
]


def named(case):
    return "x".join(map(str, case.values())) if isinstance(case, dict) else case


@pytest.mark.parametrize(("axes", "layout"), GRIDS, ids=named)
def test_loss_and_every_gradient_equal_the_unmodified_model(axes, layout):
    world = functools.reduce(lambda a, b: a * b, axes.values())
    for errors in on_ranks(world, against_hugging_face, tiny.config_path(), axes, layout):
        assert max(errors.values()) <= 1e-12, errors


@functools.cache
def single_rank_curve(steps, **sizes):
    return on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", **sizes), steps)[0][0]


def check_run(plan, steps, ranks=(0, 5)):
    """Losses as on one rank within 1e-5; the first two steps as rehearsed, on some of the ranks."""
    runs = on_ranks(plan.world_size, tiny.train, plan, steps, 2)
    for losses, _ in runs:
        curve = zip(losses, single_rank_curve(20, micro_batch=plan.micro_batch, sequence=plan.sequence), strict=False)
        assert max(abs(a - b) / b for a, b in curve) <= 1e-5
    for rank in ranks:
        assert_same(rehearse(tiny.config_path(), plan, rank=rank), runs[rank][1])
    return [real for _, real in runs]


@pytest.mark.parametrize(
    ("axes", "layout"),
    slow_at((1,), [(CUBE, "grid-scatter"), (CUBE, "grid-reduce"), ({"i": 2, "j": 3}, "grid-2d")]),
    ids=named,
)
def test_f1_same_curve_and_d1_rehearsal_equals_reality(axes, layout):
    check_run(tiny.plan_of(axes, layout), 20 if axes is CUBE else 3)


@pytest.mark.parametrize("overlap", slow_in(["async"], ["async", "ring"]))
def test_overlap_modes_train_alike(overlap):
    plan = tiny.plan_of(CUBE, "grid-scatter")
    layouts = {}
    for site in sites_of(plan):
        layouts[site.name] = sw.GridLayout(**{**plan.layout_for(site).to_dict(), "overlap": overlap})
    check_run(plan.evolve(layouts=layouts), 2, (5,))


def sites_of(plan):
    config = load_config(plan.config_path)
    return family_of(config).sites(config, plan.micro_batch * plan.sequence)


@pytest.mark.parametrize("layout", slow_in(["grid-reduce"], ["grid-scatter", "grid-reduce"]))
def test_a14_recomputed_blocks(layout):
    """Each operand of an edge is gathered once more, but the X that the replay gathered goes on to dW."""
    plan = tiny.plan_of(CUBE, layout)
    plain = check_run(plan, 2, ())[0]
    again = check_run(plan.evolve(recompute={"*": "block"}), 2, (0,))[0]
    assert again.saved_bytes < plain.saved_bytes
    for site, linears in (("mlp.gate_up", 2), ("self_attn.qkv", 3)):
        name = f"model.layers.0.{site}"

        def count(trace, kind, name=name):
            found = [c for c in trace.collectives if c.module == name and c.step == 1 and c.axes != ("i",)]
            return sum(c.kind == kind for c in found)

        if layout == "grid-scatter":
            # X: forward, replay (kept for dW); dY. Without recomputation X comes again in backward: as many.
            assert count(again, "all_gather") == count(plain, "all_gather")
            assert count(again, "reduce_scatter") == count(plain, "reduce_scatter") + linears
        else:
            assert count(again, "all_reduce") == count(plain, "all_reduce") + linears


FEW = [  # sequences that do not fill the m axes
    (CUBE, "grid-scatter", 1, 64, {}),
    (CUBE, "grid-reduce", 1, 64, {}),
    (CUBE, "grid-scatter", 3, 15, {"num_key_value_heads": 4}),
    ({"i": 2, "d": 2, "j": 2}, "grid-25d", 2, 16, {"num_key_value_heads": 2}),  # i splits the batch, d sequences
    ({"i": 2, "j": 2, "l": 1}, "grid-scatter", 3, 7, {"tie_word_embeddings": True, "attention_bias": True}),
    ({"data": 4, "tensor": 1}, "replicate", 6, 5, {}),
]


@pytest.mark.parametrize(("axes", "layout", "batch", "sequence", "changes"), FEW)
def test_a21_a_batch_that_does_not_divide_falls_to_the_sequence(axes, layout, batch, sequence, changes):
    world = functools.reduce(lambda a, b: a * b, axes.values())
    path = tiny.config_path(**changes)
    for errors in on_ranks(world, against_hugging_face, path, axes, layout, batch, sequence):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("layout", slow_in(["grid-reduce"], ["grid-scatter", "grid-reduce"]))
def test_a21_one_sequence_trains_as_on_one_rank(layout):
    check_run(tiny.plan_of(CUBE, layout, micro_batch=1, sequence=64), 20)


def test_a21_under_recomputation():
    plan = tiny.plan_of(CUBE, "grid-scatter", micro_batch=1, sequence=32, recompute={"*": "block"})
    check_run(plan, 2, (3,))


HEADS = [
    ("grid-scatter", tiny.BATCH, 12),  # heads divide
    ("grid-scatter", tiny.BATCH, 2),  # keys and values do not: they are gathered
    ("grid-scatter", 1, 12),  # uneven: 6 over (2, 2)
    ("grid-scatter", 1, 4),
    ("grid-reduce", 1, 12),
]


@pytest.mark.parametrize(("layout", "batch", "kv_heads"), HEADS)
def test_b8_whole_sequences_by_formula(layout, batch, kv_heads):
    """Heads exchanged for tokens, or K and V gathered: an operation each of q, k, v and o, forward and backward."""
    path = tiny.config_path(num_key_value_heads=kv_heads)
    plan = tiny.plan_of(CUBE, layout, path, micro_batch=batch)
    qkv, out = (site for site in sites_of(plan) if site.name.startswith("model.layers.0.self_attn"))
    exchanged = exchanged_axes(plan.layout_for(qkv), plan.batch_axes)
    rows = batch // 2 * tiny.SEQUENCE if "i" in plan.batch_axes else batch * tiny.SEQUENCE
    for rank in (0, 5):
        told = attention_moves(qkv, out, plan.layout_for(qkv), plan.batch_axes, rows, CUBE, coordinates(rank, CUBE), 4)
        trace = rehearse(path, plan, rank=rank)
        for phase, gather, moves in zip(("forward", "backward"), ("all_gather", "reduce_scatter"), told, strict=True):
            kinds = {qkv.name: ("all_to_all", gather), out.name: ("all_to_all",)}
            if layout == "grid-reduce":  # W travels over the same axes
                kinds[qkv.name] = ("all_to_all",)
            counted = [
                Move(c.kind, c.axes, c.size, c.sent)
                for c in trace.collectives
                if c.step == 1
                and c.phase == phase
                and c.kind in kinds.get(c.module, ())
                and set(c.axes) == {*exchanged}
            ]
            assert counted == list(moves)
            assert len(moves) == 4


def test_b8_an_exchange_sends_a_half_of_a_half():
    plan = tiny.plan_of(CUBE, "grid-scatter")
    qkv, out = (site for site in sites_of(plan) if site.name.startswith("model.layers.0.self_attn"))
    rows, width = tiny.BATCH // 2 * tiny.SEQUENCE, tiny.FIELDS["hidden_size"] // 2  # heads over j
    for moves in attention_moves(qkv, out, plan.layout_for(qkv), ("i",), rows, CUBE, coordinates(0, CUBE), 4):
        assert moves == (Move("all_to_all", ("l",), rows * width * 4, rows * width),) * 4


def refused(path, plan):
    with pytest.raises(sw.InputError) as caught:
        rehearse(path, plan)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_b8_fewer_heads_than_ranks_are_refused_when_planning():
    path = tiny.config_path(num_attention_heads=4, num_key_value_heads=4)
    said = refused(path, tiny.plan_of(CUBE, "grid-scatter", path, micro_batch=1))
    assert "heads of model.layers.0.self_attn.q_proj is 4, which leaves some rank none" in said
    assert "allowed: a multiple of j×i×l = 8, or a batch that divides by i = 2 and layout.y replicated" in said


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_b8_keys_and_values_are_gathered_where_their_heads_cannot_be_exchanged(kv_heads):
    path = tiny.config_path(num_key_value_heads=kv_heads)
    plan = tiny.plan_of({"i": 1, "j": 2, "l": 2}, "grid-scatter", path)
    for errors in on_ranks(4, against_hugging_face, path, plan.mesh, "grid-scatter"):
        assert max(errors.values()) <= 1e-12
    if kv_heads == 2:
        for rank, (_, real) in itertools.islice(enumerate(on_ranks(4, tiny.train, plan, 2, 2, path)), 3):
            assert_same(rehearse(path, plan, rank=rank), real)


ONE_D = {
    "model.layers.0.self_attn.qkv": sw.GridLayout(m="i", n=("j", "l")),
    "model.layers.0.self_attn.o": sw.GridLayout(m="i", k=("j", "l")),
}
MIXED = [
    ({"*.mlp.*": "grid-reduce", "*": "grid-scatter"}, ["all_gather"]),
    ({"*.mlp.*": "grid-scatter", "*": "grid-reduce"}, ["all_gather"]),
    ({"*.self_attn.o": "grid-reduce", "*": "grid-scatter"}, ["all_gather"]),
    ({"*.mlp.gate_up": sw.GridLayout(m="i", n=("j", "l")), "*": "grid-scatter"}, ["all_to_all"]),
    ({**ONE_D, "model.layers.0.mlp.*": "grid-scatter", "*": "grid-reduce"}, ["all_to_all"]),
    ({"*.self_attn.o": sw.GridLayout(m="i", n="l"), "*": "grid-scatter"}, ["all_gather"]),  # X of whole features
    ({"*.mlp.*": sw.GridLayout(m=("i", "j", "l"), w="sharded"), "*": "grid-scatter"}, ["all_to_all"]),  # more m axes
    (
        {
            "*.layers.0.mlp.*": sw.GridLayout(m="i"),
            "*": sw.GridLayout(m="i", n=("j", "l"), x="sharded-features", w="sharded"),
        },
        ["all_gather"],
    ),
]


@pytest.mark.parametrize(("layouts", "kinds"), slow_at((1, 2, 4, 6, 7), MIXED))
def test_mixed_designs_along_a_chain(layouts, kinds):
    """Conversions stand on the edges where layouts differ; rehearsal equals reality with them."""
    for errors in on_ranks(8, against_hugging_face, tiny.config_path(), CUBE, layouts):
        assert max(errors.values()) <= 1e-12, errors
    real = check_run(tiny.plan_of(CUBE, layouts), 2, (6,))[0]
    assert set(kinds) <= {c.kind for c in real.collectives}


def test_axes_out_of_order_are_refused_when_planning():
    layout = sw.GridLayout(m="j", n="i")
    said = refused(tiny.config_path(), tiny.plan_of(CUBE, {"*.mlp.gate_up": layout, "*": "grid-scatter"}))
    assert "layout.m: found ['j']; allowed: axes that come before i in the mesh (i, j, l)" in said


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("grid-scatter", {"tie_word_embeddings": True}),
        ("grid-reduce", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("grid-scatter", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_tied_weights_and_biases(layout, changes):
    for errors in on_ranks(8, against_hugging_face, tiny.config_path(**changes), CUBE, layout):
        assert max(errors.values()) <= 1e-12, errors


def test_dropout_of_attention_weights_goes_by_the_heads_that_a_rank_was_given():
    path = tiny.config_path(attention_dropout=0.3)
    ((expected, _),) = on_ranks(
        1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", path, micro_batch=1), 3, 0, path
    )
    for losses, _ in on_ranks(8, tiny.train, tiny.plan_of(CUBE, "grid-scatter", path, micro_batch=1), 3, 0, path):
        assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) <= 1e-5
