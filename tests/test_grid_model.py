"""A Llama on grids: gradients, curves, rehearsal against reality (ACCEPTANCE B8, D1, F1), and what is refused."""

from __future__ import annotations

import functools

import pytest

import shardwright as sw
import tiny
from ranks import on_ranks
from reference import against_hugging_face, assert_same
from shardwright import models
from shardwright._rehearse import rehearse

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
def single_rank_curve(steps):
    return on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate"), steps)[0][0]


def check_run(plan, steps, ranks=(0, 5)):
    """Losses as on one rank within 1e-5; the first two steps as rehearsed, on some of the ranks."""
    runs = on_ranks(plan.world_size, tiny.train, plan, steps, 2)
    for losses, _ in runs:
        curve = zip(losses, single_rank_curve(20), strict=False)
        assert max(abs(a - b) / b for a, b in curve) <= 1e-5
    for rank in ranks:
        assert_same(rehearse(tiny.config_path(), plan, rank=rank), runs[rank][1])
    return [real for _, real in runs]


@pytest.mark.parametrize(
    ("axes", "layout"), [(CUBE, "grid-scatter"), (CUBE, "grid-reduce"), ({"i": 2, "j": 3}, "grid-2d")], ids=named
)
def test_f1_same_curve_and_d1_rehearsal_equals_reality(axes, layout):
    check_run(tiny.plan_of(axes, layout), 20 if axes is CUBE else 3)


@pytest.mark.parametrize("overlap", ["async", "ring"])
def test_overlap_modes_train_alike(overlap):
    plan = tiny.plan_of(CUBE, "grid-scatter")
    layouts = {}
    for site in sites_of(plan):
        layouts[site.name] = sw.GridLayout(**{**plan.layout_for(site).to_dict(), "overlap": overlap})
    check_run(plan.evolve(layouts=layouts), 2, (5,))


def sites_of(plan):
    config = models.load_config(plan.config_path)
    return models.family_of(config).sites(config, plan.batch * plan.sequence)


@pytest.mark.parametrize("layout", ["grid-scatter", "grid-reduce"])
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


def test_b8_heads_are_exchanged_for_tokens():
    """q, k, v and the mixed values: an all-to-all each, forward and backward; bytes by formula."""
    plan = tiny.plan_of(CUBE, "grid-scatter")
    trace = rehearse(tiny.config_path(), plan)
    tokens = tiny.BATCH // 2 * tiny.SEQUENCE
    width = tiny.FIELDS["hidden_size"] // 2  # of one of q, k, v, o: heads over j
    found = [c for c in trace.collectives if c.kind == "all_to_all" and c.step == 1]
    assert len(found) == 8 * tiny.FIELDS["num_hidden_layers"]
    for move in found:
        assert move.axes == ("l",)
        assert move.size == tokens * width * 4
        assert move.sent == move.size // 4  # a half of what a rank holds, which is a half


def test_b8_heads_that_do_not_divide_are_refused_when_planning():
    path = tiny.config_path(num_key_value_heads=2)
    with pytest.raises(
        sw.InputError, match=r"heads of model.layers.0.self_attn.k_proj is 2; allowed: .*j×l = 4"
    ) as caught:
        rehearse(path, tiny.plan_of(CUBE, "grid-scatter", path))
    assert "\n" not in str(caught.value)
    for errors in on_ranks(8, against_hugging_face, path, CUBE, "grid-reduce"):
        assert max(errors.values()) <= 1e-12


MIXED = [
    ({"*.mlp.*": "grid-reduce", "*": "grid-scatter"}, ["all_gather"]),
    ({"*.mlp.*": "grid-scatter", "*": "grid-reduce"}, ["all_gather"]),
    ({"*.self_attn.o": "grid-reduce", "*": "grid-scatter"}, ["all_gather"]),
    ({"*.mlp.gate_up": sw.GridLayout(m="i", n=("j", "l")), "*": "grid-scatter"}, ["all_to_all"]),
]


@pytest.mark.parametrize(("layouts", "kinds"), MIXED)
def test_mixed_designs_along_a_chain(layouts, kinds):
    """Conversions stand on the edges where layouts differ; rehearsal equals reality with them."""
    for errors in on_ranks(8, against_hugging_face, tiny.config_path(), CUBE, layouts):
        assert max(errors.values()) <= 1e-12, errors
    real = check_run(tiny.plan_of(CUBE, layouts), 2, (6,))[0]
    assert set(kinds) <= {c.kind for c in real.collectives}


def test_layouts_without_a_conversion_are_refused():
    layouts = {"*.self_attn.o": sw.GridLayout(m="i", n="l"), "*": "grid-scatter"}
    with pytest.raises(sw.InputError, match="leaves tokens split by") as caught:
        rehearse(tiny.config_path(), tiny.plan_of(CUBE, layouts))
    assert "\n" not in str(caught.value)


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
