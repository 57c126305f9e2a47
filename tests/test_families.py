"""Every family against Hugging Face's unmodified model, its curve on four ranks, and real configs on the meta device
(ACCEPTANCE A12, A18, B2, B3, B5, B7, D1, D3, F1, F3)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.simulate.rehearsal import rehearse, stage
from shardwright.step.train_step import record_evaluation, record_initialisation
from shardwright.values.initial import Unfilled
from support import dense, tiny
from support.marks import slow_in, slow_where
from support.ranks import on_ranks
from support.reference import against_hugging_face, assert_same, both

COMMON = {
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 240,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "initializer_range": 0.05,
}
GPT2 = {
    "n_embd": 96,
    "n_layer": 2,
    "n_head": 12,
    "n_positions": 64,
    "vocab_size": 240,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = {
    "llama": {**COMMON, "tie_word_embeddings": True},
    "qwen2": {**COMMON, "tie_word_embeddings": False},
    "qwen3": {**COMMON, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {**COMMON, "sliding_window": 6},
    "gemma2": {
        **COMMON,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi": {**COMMON, "num_key_value_heads": 12, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "gpt2": {**GPT2, **NO_DROPOUT},
}


@functools.cache
def path_of(family: str, **changes) -> Path:
    return tiny.write_config({"model_type": family, **FAMILIES[family], **changes})


GRID = [
    ({"data": 2, "tensor": 2}, "sequence-parallel"),
    ({"data": 1, "tensor": 4}, "tensor-all-reduce"),
    ({"data": 4, "tensor": 1}, "replicate"),
]


@pytest.mark.parametrize(
    ("family", "axes", "layout"),
    slow_where(
        lambda family, axes, layout: family != "llama" and axes is not GRID[0][0],
        [(family, *case) for family in FAMILIES for case in GRID],
    ),
)
def test_every_gradient_of_every_family_equals_dense(family, axes, layout):
    """B2 (per-head norms of Qwen3) and B3 (tied weights) among them."""
    for errors in on_ranks(4, against_hugging_face, path_of(family), axes, layout):
        assert max(errors.values()) <= 1e-11, errors


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_windows_equal_hugging_faces_own_masks(family):
    path = path_of("mistral") if family == "mistral" else path_of(
        "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    )  # fmt: skip
    for errors in on_ranks(4, against_hugging_face, path, *GRID[0], tiny.BATCH, tiny.SEQUENCE, True):
        assert max(errors.values()) <= 1e-11, errors


ODD = {"vocab_size": 241, "intermediate_size": 146, "num_key_value_heads": 12}


@pytest.mark.parametrize("layout", ["sequence-parallel", "sequence-parallel-keep", "tensor-all-reduce"])
@pytest.mark.parametrize(
    ("axes", "batch", "sequence"),
    [
        ({"data": 1, "tensor": 4}, 3, 7),
        ({"data": 2, "tensor": 2}, 5, 7),
        ({"data": 1, "tensor": 4}, 1, 5),
        ({"data": 4, "tensor": 1}, 7, 5),
    ],
)
def test_a12_nothing_divides(axes, batch, sequence, layout):
    """Vocabulary 241, 146 features, odd batches and sequences; a rank may even be left without tokens."""
    for errors in on_ranks(4, against_hugging_face, path_of("llama", **ODD), axes, layout, batch, sequence):
        assert max(errors.values()) <= 1e-11, errors


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("kv", "axes"), [(2, {"data": 1, "tensor": 4}), (1, {"data": 1, "tensor": 4}), (1, GRID[0][0])]
)
def test_b5_key_value_heads_that_ranks_share(family, kv, axes):
    """Fewer key/value heads than ranks: held by several, gradients summed."""
    path = path_of(family, num_key_value_heads=kv)
    for layout in ("sequence-parallel", "tensor-all-reduce"):
        for errors in on_ranks(4, against_hugging_face, path, axes, layout):
            assert max(errors.values()) <= 1e-11, errors


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 6}, {"num_attention_heads": 6, "num_key_value_heads": 2}])
def test_b5_heads_that_can_be_neither_split_nor_shared_are_refused_when_planning(changes):
    path = path_of("llama", head_dim=16, **changes)
    with pytest.raises(sw.InputError, match=r"heads of model\.layers\.0\.self_attn\.[qk]_proj is 6; allowed"):
        rehearse(path, tiny.plan_of({"data": 1, "tensor": 4}, "sequence-parallel", path))


@functools.cache
def single_rank_curve(family):
    path = path_of(family)
    return on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", path), 20, 0, path)[0][0]


@pytest.mark.parametrize("family", slow_in(["qwen2", "mistral", "phi", "gpt2"], FAMILIES))
def test_every_family_trains_to_the_single_rank_curve_and_its_rehearsal_is_the_run(family):
    path = path_of(family)
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", path)
    reference = single_rank_curve(family)
    assert reference[-1] < 0.95 * reference[0]
    for rank, (losses, real) in enumerate(on_ranks(4, tiny.train, plan, 20, 2, path)):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
        if rank in (0, 3):
            assert_same(rehearse(path, plan, rank=rank), real)


@pytest.mark.parametrize("tensor", [3, 4])
def test_uneven_rehearsals_equal_reality_on_every_rank(tensor):
    path = path_of("llama", **ODD)
    plan = tiny.plan_of({"data": 1, "tensor": tensor}, "sequence-parallel", path, micro_batch=3, sequence=7)
    peaks = set()
    for rank, (_, real) in enumerate(on_ranks(tensor, tiny.train, plan, 2, 2, path)):
        assert_same(rehearse(path, plan, rank=rank), real)
        peaks.add(real.peak_bytes)
    assert len(peaks) > 1  # ranks differ, and the rehearsal of each tells it


def dropout_run(axes, layout, recorded):
    """Losses of a GPT-2 with every dropout on: equal for every layout, since masks go by global index."""
    path = path_of("gpt2", attn_pdrop=0.2, resid_pdrop=0.1, embd_pdrop=0.1)
    plan = tiny.plan_of(axes, layout, path)
    losses, trace = tiny.train(plan, 5, recorded, path)
    again, _ = tiny.train(plan.evolve(seed=1), 1, 0, path)
    return losses, again[0], trace


def test_b7_dropout_drops_the_same_elements_under_every_layout():
    ((reference, other_seed, _),) = on_ranks(1, dropout_run, {"data": 1, "tensor": 1}, "replicate", 0)
    for axes, layout in (*GRID, ({"data": 2, "tensor": 2}, "tensor-all-reduce")):
        for losses, _, _ in on_ranks(4, dropout_run, axes, layout, 0):
            assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
    path = path_of("gpt2")
    ((without, _),) = on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", path), 1, 0, path)
    assert abs(without[0] - reference[0]) > 1e-3 and abs(other_seed - reference[0]) > 1e-3


def test_d1_holds_with_dropout():
    path = path_of("gpt2", attn_pdrop=0.2, resid_pdrop=0.1, embd_pdrop=0.1)
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", path)
    for rank, (_, _, real) in enumerate(on_ranks(4, dropout_run, plan.mesh, "sequence-parallel", 2)):
        assert_same(rehearse(path, plan, rank=rank), real)


def whole_weights(axes, layout, path):
    plan = tiny.plan_of(axes, layout, path)
    model, _ = tiny.build(plan, path)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_b7_a_seed_gives_the_same_weights_for_every_layout(family):
    path = path_of(family, num_key_value_heads=2) if family == "qwen3" else path_of(family)
    (reference,) = on_ranks(1, whole_weights, {"data": 1, "tensor": 1}, "replicate", path)
    assert len({float(w.flatten()[0]) for w in reference.values() if w.dim() == 2}) > 3
    for axes, layout in GRID:
        for weights in on_ranks(4, whole_weights, axes, layout, path):
            assert weights.keys() == reference.keys()
            assert all(torch.equal(weights[name], reference[name]) for name in reference)


def initialise_and_evaluate(path, plan):
    mesh = dense.mesh_of(**plan.mesh)
    config = load_config(path)
    meta = build_meta(config, plan.dtype)
    model, initialisation = record_initialisation(lambda: sw.parallelize(meta, mesh, plan))
    step = sw.TrainStep(model, mesh, plan)
    loss, evaluation = record_evaluation(step, tiny.batches(plan, 1, mesh.get_local_rank("data"))[0])
    (again,) = [step(micro) for micro in tiny.batches(plan, 1, mesh.get_local_rank("data"))]
    return loss.item(), again.item(), model.training, initialisation, evaluation


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_d3_initialisation_and_evaluation_are_rehearsed_too(family):
    path = path_of(family)
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", path)
    for rank, (loss, again, training, first, second) in enumerate(on_ranks(4, initialise_and_evaluate, path, plan)):
        assert loss == pytest.approx(again, rel=1e-6) and training
        for job, real in (("initialisation", first), ("evaluation", second)):
            rehearsed = rehearse(path, plan, rank=rank, job=job)
            assert rehearsed.events == real.events and rehearsed.peaks == real.peaks
        assert second.saved_bytes == 0 and first.points[-1].categories["parameter"] == first.points[-1].total - sum(
            v for k, v in first.points[-1].categories.items() if k != "parameter"
        )


REAL = json.loads((Path(__file__).parent / "data" / "model_configs.json").read_text())


@pytest.mark.parametrize("name", REAL)
def test_f3_real_configs_build_and_shard_with_the_published_number_of_parameters(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(REAL[name]["config"]))
    config = load_config(path)
    tensor = 4 if config.num_attention_heads % 8 else 8
    plan = tiny.plan_of(
        {"data": 2, "tensor": tensor}, "sequence-parallel", path, dtype="bfloat16", micro_batch=2, sequence=64
    )
    with stage(plan, 1) as mesh:
        model = build_meta(config, plan.dtype)
        with FakeTensorMode():
            model = sw.parallelize(model, mesh, plan, source=Unfilled(torch.device("cpu")))
        whole = sum(parameter.numel() for parameter in model.parameters())
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert whole == REAL[name]["parameters"]
    assert whole / tensor <= local < 1.1 * whole / tensor


def test_f3_there_are_at_least_12_models_of_7_families():
    assert len(REAL) >= 12 and len({entry["config"]["model_type"] for entry in REAL.values()}) >= 7


def built_in_any_order(order):
    """A18: layouts live in sites, not in global state: build two models at once, sites in any order."""
    mesh = dense.mesh_of(data=1, tensor=4)
    path = path_of("llama")
    torch.manual_seed(0)
    plans = [tiny.plan_of({"data": 1, "tensor": 4}, layout, path, dtype="float64") for layout in
             ("sequence-parallel", "tensor-all-reduce")]  # fmt: skip
    pairs = [both(path, plan, mesh) for plan in (plans if order == 0 else plans[::-1])]
    ids = torch.randint(0, 240, (2, 8), generator=torch.Generator().manual_seed(1))
    losses = [model(input_ids=ids, labels=ids).loss for model, _ in pairs]
    for loss in losses if order == 0 else losses[::-1]:
        loss.backward()
    grads = [
        {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        for model, _ in (pairs if order == 0 else pairs[::-1])
    ]
    return grads


def test_a18_two_models_at_once_in_any_order():
    for (a, b), (c, d) in zip(on_ranks(4, built_in_any_order, 0), on_ranks(4, built_in_any_order, 1), strict=True):
        for name in a:
            assert torch.equal(a[name], c[name]) and torch.equal(b[name], d[name])
            assert dense.error(a[name], b[name]) <= 1e-12 * max(1.0, a[name].abs().max().item())


def linears_in_any_order(order):
    mesh = dense.mesh_of(tensor=4)
    weights = {name: dense.random(16, 16, seed=i) for i, name in enumerate("qkvo")}
    column = sw.GridLayout(n=("tensor",), x="sharded")
    row = sw.GridLayout(k=("tensor",), y="sharded")
    made = {}
    for name in order:
        linear = torch.nn.Linear(16, 16, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(weights[name])
        made[name] = sw.GridLinear.from_dense(linear, row if name == "o" else column, mesh)
    x = dense.part(dense.random(8, 16, seed=9), mesh, made["q"].input_placements).requires_grad_()
    made["o"](made["q"](x) * made["k"](x) + made["v"](x)).square().sum().backward()
    return x.grad, {name: made[name].weight.grad.to_local() for name in sorted(made)}


def test_a18_linears_built_in_any_order():
    reference = on_ranks(4, linears_in_any_order, "qkvo")
    for order in ("ovkq", "kqov"):
        for (gx, gw), (rx, rw) in zip(on_ranks(4, linears_in_any_order, order), reference, strict=True):
            assert torch.equal(gx, rx) and all(torch.equal(gw[name], rw[name]) for name in rw)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("gpt2", {}, "queries, keys and values in one linear; allowed: a batch that divides by data = 2"),
        ("starcoder2", {"fallback": True}, "micro_batch: found 3; allowed: a multiple of data = 2"),
    ],
)
def test_a_batch_that_cannot_fall_to_the_sequence_is_refused(family, settings, words):
    path = path_of(family) if family in FAMILIES else tiny.write_config({"model_type": family, **COMMON})
    with pytest.raises(sw.InputError, match=words) as caught:
        rehearse(path, tiny.plan_of({"data": 2, "tensor": 1}, "replicate", path, micro_batch=3, **settings))
    assert "\n" not in str(caught.value)


def fallback_run(axes, steps, recorded, level="replicate"):
    path = tiny.write_config({"model_type": "starcoder2", **COMMON, "sliding_window": None, "use_bias": True})
    plan = tiny.plan_of(axes, "replicate", path, fallback=True, params={"*": level})
    return tiny.train(plan, steps, recorded, path)


def test_a_family_without_a_rule_is_refused_or_runs_unsplit():
    path = tiny.write_config({"model_type": "starcoder2", **COMMON, "sliding_window": None, "use_bias": True})
    refused = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", path)
    with pytest.raises(
        sw.InputError, match="found 'starcoder2'; allowed: gemma2, gpt2, llama, mistral, phi, qwen2, qwen3"
    ):
        rehearse(path, refused)
    ((reference, _),) = on_ranks(1, fallback_run, {"data": 1, "tensor": 1}, 10, 0)
    assert reference[-1] < reference[0]
    axes = {"data": 4, "tensor": 1}
    plan = tiny.plan_of(axes, "replicate", path, fallback=True, params={"*": "parameters"})
    for rank, (losses, real) in enumerate(on_ranks(4, fallback_run, axes, 10, 2, "parameters")):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
        assert_same(rehearse(path, plan, rank=rank), real)
