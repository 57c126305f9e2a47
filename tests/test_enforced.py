"""What a plan states takes effect, or is refused in one line (ACCEPTANCE F5)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.models.fits import check_fits
from shardwright.simulate.rehearsal import stage
from shardwright.spec.plan import Plan
from shardwright.step.train_step import record_steps
from support import dense, tiny
from support.ranks import on_ranks

MESH = {"data": 2, "tensor": 1}


def live(path: Path, dtype: torch.dtype) -> Any:
    """A Hugging Face model with values, the same on every rank."""
    torch.manual_seed(3)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(load_config(path), dtype=dtype)


# Element types


def converted(plan: Plan, dtype: torch.dtype) -> tuple[Any, ...]:
    """Of a live model in ``dtype`` under the plan: stored types, types of W and of logits, values kept, peak."""
    model = live(tiny.config_path(), dtype)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    mesh = dense.mesh_of(**plan.mesh)
    sw.parallelize(model, mesh, plan)
    stored: dict[str, Any] = dict(model.named_parameters())
    kept = all(
        torch.equal(value.full_tensor(), before[name].to(value.dtype))
        for name, value in stored.items()
        if isinstance(value, DTensor)
    )
    step = sw.TrainStep(model, mesh, plan)
    data = tiny.batches(plan, 2, mesh.get_rank())
    logits = model(input_ids=data[0][0][0]).logits.dtype
    _, trace = record_steps(step, data)
    moments = {state["exp_avg"].dtype for state in step.optimizer.state.values()}
    return {value.dtype for value in stored.values()}, moments, logits, kept, trace.peak_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_live_model_is_stored_and_computed_as_the_plan_says(dtype: torch.dtype) -> None:
    """A bfloat16 model under float32 masters kept bfloat16 weights and moments: 1,974,696 bytes for 3,625,228."""
    plan = tiny.plan_of(MESH, "replicate", dtype="bfloat16", master_dtype="float32")
    peak = sw.rehearse(plan.config_path, plan).peak_bytes
    for stored, moments, logits, kept, measured in on_ranks(2, converted, plan, dtype):
        assert stored == moments == {torch.float32}
        assert logits == torch.bfloat16 and kept
        assert measured == peak


def test_a_live_model_in_float32_is_stored_in_bfloat16_where_the_plan_says_so() -> None:
    plan = tiny.plan_of(MESH, "replicate", dtype="bfloat16", master_dtype="bfloat16")
    for stored, moments, logits, kept, _ in on_ranks(2, converted, plan, torch.float32):
        assert stored == moments == {torch.bfloat16} and logits == torch.bfloat16 and kept


def test_masters_are_float32_under_bfloat16_unless_told() -> None:
    def stored(**fields: Any) -> str:
        return tiny.plan_of(MESH, "replicate", **fields).stored_dtype

    assert stored(dtype="bfloat16") == stored(dtype="float32") == "float32"
    assert (
        stored(dtype="bfloat16", master_dtype=None) == stored(dtype="bfloat16", master_dtype="bfloat16") == "bfloat16"
    )
    assert stored(dtype="float64") == "float64"
    assert tiny.plan_of(MESH, "replicate").evolve(dtype="bfloat16").stored_dtype == "float32"


def norms_moved(plan: Plan) -> tuple[int, int]:
    """(values of norm weights that 20 steps at a learning rate of 1e-4 moved, all of them)."""
    model, mesh = tiny.build(plan)
    step = sw.TrainStep(model, mesh, plan, learning_rate=1e-4)
    (data,) = tiny.batches(plan, 1, mesh.get_rank())
    for _ in range(20):
        step(data)
    norms = [value.full_tensor() for name, value in model.named_parameters() if "norm" in name]
    return sum(int((norm != 1).sum()) for norm in norms), sum(norm.numel() for norm in norms)


def test_norm_weights_move_under_bfloat16_as_it_is_by_default() -> None:
    """None of them did in bfloat16 without masters: 1 − 1e-4 is 1 there."""
    plan = tiny.plan_of(
        MESH, "replicate", tiny.config_path(num_hidden_layers=1), dtype="bfloat16", micro_batch=2, sequence=8
    )
    moved, values = on_ranks(2, norms_moved, plan)[0]
    assert moved > 0.9 * values
    assert on_ranks(2, norms_moved, plan.evolve(master_dtype="bfloat16"))[0] == (0, values)


# Patterns


NO_BLOCK = "found a pattern that matches no block; allowed: a pattern of their names, such as "
NO_GROUP, NO_SITE = NO_BLOCK.replace("block", "parameter group"), NO_BLOCK.replace("block", "site")
SHADOWED = "found a pattern that decides no {}, since {!r} before it matches {}; allowed: an order in which each"
RING, SEQUENCE = "sequence-parallel-ring", "sequence-parallel"
PATTERNS = [
    ("recompute.model.layer.*", {"model.layer.*": "block"}, NO_BLOCK + "model.layers.0"),
    ("params.model.layer.*", {"model.layer.*": "parameters", "*": "optimizer"}, NO_GROUP + "model.layers.0"),
    ("params.model.layers.*.mlp", {"model.layers.*.mlp": "parameters"}, NO_GROUP + "model.layers.0"),
    ("params.lm_head", {"*": "parameters", "lm_head": "optimizer"}, SHADOWED.format("parameter group", "*", "lm_head")),
    ("layouts.*.mlp.dwon", {"*.mlp.dwon": RING, "*": SEQUENCE}, NO_SITE + "model.layers.0.mlp.down"),
    (
        "layouts.*.down",
        {"*.mlp.*": SEQUENCE, "*.down": RING, "*": SEQUENCE},
        SHADOWED.format("site", "*.mlp.*", "model.layers.0.mlp.down"),
    ),
]


@pytest.mark.parametrize(("key", "patterns", "line"), PATTERNS, ids=[key for key, _, _ in PATTERNS])
def test_a_pattern_that_decides_nothing_is_refused(key: str, patterns: dict[str, Any], line: str) -> None:
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel").evolve(**{key.split(".")[0]: patterns})
    with pytest.raises(sw.InputError) as caught:
        sw.rehearse(plan.config_path, plan)
    assert str(caught.value).startswith(f"{key}: {line}") and len(str(caught.value)) <= 300
    model = build_meta(load_config(plan.config_path))
    with pytest.raises(sw.InputError) as again:
        check_fits(model, plan)
    assert str(again.value) == str(caught.value)


def test_a_tied_head_is_of_the_group_of_its_embedding() -> None:
    path = tiny.config_path(tie_word_embeddings=True)
    plan = tiny.plan_of(MESH, "replicate", path, params={"lm_head": "parameters", "*": "replicate"})
    with pytest.raises(sw.InputError, match=r"params.lm_head: found a pattern that matches no parameter group"):
        sw.rehearse(path, plan)


def test_patterns_of_a_model_without_a_rule_table_are_refused_too() -> None:
    plan = tiny.plan_of(MESH, "replicate", path_of_opt(), fallback=True, params={"model.decoder.layer.*": "parameters"})
    with pytest.raises(
        sw.InputError, match=r"params.model.decoder.layer.\*: found a pattern that matches no parameter group"
    ):
        sw.rehearse(plan.config_path, plan)


def path_of_opt(**changes: Any) -> Path:
    """A tiny OPT: no rule table, and learned positions."""
    fields = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    more = {"model_type": "opt", "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    return tiny.write_config({**fields, **more, **changes})


# Positions


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 1024}


@pytest.mark.parametrize(
    ("path", "changes", "line"),
    [
        (
            lambda: tiny.write_config(GPT2),
            {"sequence": 2048},
            "at most 1024, the positions of the model (n_positions of",
        ),
        (
            path_of_opt,
            {"sequence": 65, "fallback": True},
            "at most 64, the positions of the model (max_position_embedd",
        ),
    ],
    ids=["gpt2", "opt"],
)
def test_more_tokens_than_positions_are_refused(path: Any, changes: dict[str, Any], line: str) -> None:
    plan = tiny.plan_of({"data": 1, "tensor": 1}, "replicate", path(), micro_batch=1, **changes)
    refusal = f"sequence: found {plan.sequence}; allowed: {line}"
    config = load_config(plan.config_path)
    with pytest.raises(sw.InputError) as rehearsed:
        sw.rehearse(config, plan)
    with stage(plan, 0) as mesh, pytest.raises(sw.InputError) as parallelized:
        sw.parallelize(build_meta(config), mesh, plan)
    assert str(rehearsed.value).startswith(refusal) and str(parallelized.value) == str(rehearsed.value)
    assert sw.rehearse(config, plan.evolve(sequence=64)).peak_bytes > 0


def test_more_tokens_than_positions_are_refused_when_planning() -> None:
    path = tiny.write_config(GPT2)
    with pytest.raises(sw.InputError, match="sequence: found 2048; allowed: at most 1024, the positions of the model"):
        sw.plan(path, "1xH100-80GB", global_batch=1, sequence=2048)


def test_beyond_the_stated_length_of_rotary_positions_is_warned_of() -> None:
    plan = tiny.plan_of({"data": 1, "tensor": 1}, "replicate", sequence=65)
    config = load_config(plan.config_path)
    with (
        stage(plan, 0) as mesh,
        pytest.warns(UserWarning, match="sequence: 65 tokens are more than the 64 .*max_position"),
    ):
        sw.parallelize(build_meta(config), mesh, plan)
    with stage(plan, 0) as mesh, warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.parallelize(build_meta(config), mesh, plan.evolve(sequence=64))


# TrainStep


def steps_refused(plan: Plan) -> list[str]:
    """What a step says to what it was not made for."""
    model, mesh = tiny.build(plan)
    (right,) = tiny.batches(plan, 1, mesh.get_rank())
    told = []

    def refused(*given: Any) -> None:
        with pytest.raises(sw.InputError) as caught:
            sw.TrainStep(*given)
        told.append(str(caught.value))

    refused(torch.nn.Linear(2, 2), mesh, plan)
    refused(model, mesh, plan.evolve(accumulation=1))
    refused(model, mesh, plan.evolve(layouts={"lm_head": "replicate", "*": "replicate"}))
    refused(model, mesh["data"], plan)
    step = sw.TrainStep(model, mesh, plan.evolve(arena=None, solve_time=1.0))
    before = {name: value.to_local().clone() for name, value in model.named_parameters()}
    (ids, labels), _ = right
    for wrong in (
        right[:1],
        [*right, right[0]],
        [(ids[:1], labels[:1])] * 2,
        [(ids, labels[:, :-1])] * 2,
        [(ids.T,) * 2] * 2,
    ):
        with pytest.raises(sw.InputError) as caught:
            step(wrong)
        told.append(str(caught.value))
    with pytest.raises(sw.InputError) as caught:
        step.evaluate([(ids[:, 1:], labels[:, 1:])])
    told.append(str(caught.value))
    assert all(torch.equal(value.to_local(), before[name]) for name, value in model.named_parameters())
    step(right), step.evaluate(right[:1])
    return told


def test_a_step_uses_what_it_is_given_or_refuses_it() -> None:
    plan = tiny.plan_of(MESH, "replicate", accumulation=2, micro_batch=4)
    for told in on_ranks(2, steps_refused, plan):
        expected = [
            "model: found one that lies on no mesh; allowed: a model that sw.parallelize returned",
            "plan: found another accumulation (1) than that of the model (2); allowed: the plan that",
            "plan: found another layouts (a mapping) than that of the model (a mapping); allowed: the plan",
            "mesh: found DeviceMesh((data=2)",
            "step: found 1 micro-batches; allowed: 2, the plan's accumulation",
            "step: found 3 micro-batches; allowed: 2, the plan's accumulation",
            "input_ids: found [1, 16] in micro-batch 0; allowed: [2, 16], this rank's sequences of the plan's",
            "labels: found [2, 15] in micro-batch 0; allowed: [2, 16], this rank's",
            "input_ids: found [16, 2] in micro-batch 0; allowed: [2, 16]",
            "input_ids: found [2, 15] in micro-batch 0; allowed: [2, 16]",
        ]
        assert [line[: len(want)] for line, want in zip(told, expected, strict=True)] == expected
        assert all(len(line) <= 300 for line in told)
