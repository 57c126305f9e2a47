"""Models without a rule table: draws follow the plan's seed, files and checkpoints bring all back."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file

import shardwright as sw
from shardwright.checkpoint import training_state as checkpoint
from shardwright.checkpoint.export import save_pretrained
from shardwright.checkpoint.manifest import RunState
from shardwright.checkpoint.pretrained import from_safetensors
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.simulate.rehearsal import rehearse
from shardwright.step.train_step import record_initialisation
from shardwright.values.initial import Unfilled
from shardwright.values.random import fold
from support import dense, tiny
from support.ranks import on_ranks
from support.reference import assert_same
from support.unruled import FAMILIES
from support.unsplit import against_own_code, built, dense_of, numbers, path_of, plan_of, rows_of

# Dropout, recomputation


DROPPED = {"attention_dropout": 0.3, "residual_dropout": 0.2}


def drawn(path, plan, again=False):
    """Losses of three training forwards and an evaluation, and gradients; again: compared with the unmodified model."""
    model, mesh = tiny.build(plan, path)
    reference = dense_of(model, path, "sdpa") if again else None
    outside = torch.get_rng_state()
    ids, losses, expected = rows_of(mesh, numbers(1)), [], []
    for _ in range(3):
        losses.append(model(input_ids=ids, labels=ids, shift_labels=ids).loss)
        if reference is not None:
            with torch.random.fork_rng():
                torch.manual_seed(fold(model.forward_draws.key, len(losses) - 1))
                logits = reference(input_ids=ids).logits
            expected.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
    losses[-1].backward()
    assert torch.equal(outside, torch.get_rng_state())
    gradients = {name: value.grad.full_tensor() for name, value in model.named_parameters()}
    if reference is not None:
        expected[-1].backward()
        for name, value in reference.named_parameters():
            assert dense.error(gradients[name], value.grad) <= 1e-5 * max(1e-3, value.grad.abs().max().item())
        for a, b in zip(losses, expected, strict=True):
            assert dense.error(a, b) <= 1e-5
    model.eval()
    with torch.no_grad():
        losses.append(model(input_ids=ids, labels=ids, shift_labels=ids).loss)
    return [loss.item() for loss in losses], gradients


def test_dropout_is_the_models_own_and_follows_the_plans_seed():
    path = tiny.write_config({"model_type": "seed_oss", **FAMILIES["starcoder2"], **DROPPED})
    ((losses, gradients),) = on_ranks(1, drawn, path, plan_of(path), True)
    assert len(set(losses)) == 4
    assert on_ranks(1, drawn, path, plan_of(path))[0][0] == losses
    other = on_ranks(1, drawn, path, plan_of(path, seed=1))[0][0]
    assert not set(other) & set(losses)
    ((again, same),) = on_ranks(1, drawn, path, plan_of(path, recompute={"model.layers.*": "block"}))
    assert again == losses
    for name, gradient in gradients.items():
        assert dense.error(gradient, same[name]) <= 1e-6


def resumed(path, plan, directory):
    """The loss of the third training forward, in one run and after a checkpoint of the first two."""
    ids = numbers(1)
    model = built(plan, path)
    for _ in range(2):
        model(input_ids=ids, labels=ids)
    state = RunState(step=1, seed=0, tokens=1, model=plan.model.sha256, plan="0" * 64)
    checkpoint.save(directory, model, None, state)
    again = built(plan, path, Unfilled(torch.device("cpu")))
    checkpoint.load(directory / "step-00000001", again)
    return [each(input_ids=ids, labels=ids).loss.item() for each in (model, again, built(plan, path))]


def test_dropout_goes_on_after_a_checkpoint(tmp_path):
    path = tiny.write_config({"model_type": "seed_oss", **FAMILIES["starcoder2"], **DROPPED})
    ((goes_on, again, anew),) = on_ranks(1, resumed, path, plan_of(path), tmp_path)
    assert goes_on == again != anew


def draws_of(path, plan):
    model, _ = tiny.build(plan, path)
    ids = numbers(1)[:2]
    return [model(input_ids=ids, labels=ids, shift_labels=ids).loss.item() for _ in range(2)]


def test_data_ranks_drop_different_elements():
    path = tiny.write_config({"model_type": "seed_oss", **FAMILIES["starcoder2"], **DROPPED})
    first, second = on_ranks(2, draws_of, path, plan_of(path, 2))
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("family", ["deepseek_v3", "starcoder2"])
def test_recomputed_blocks_take_effect(family):
    """Less is saved, gradients are the model's own, and it is rehearsed."""
    path = path_of(family)
    plan = plan_of(path, 2, params={"*": "parameters"}, recompute={"model.layers.1": "block"})
    runs = on_ranks(2, against_own_code, path, plan)
    whole = rehearse(path, plan.evolve(recompute={}), rank=1, steps=1)
    for errors, trace in runs:
        assert max(errors.values()) <= 1e-5, errors
        assert trace.saved_bytes < 0.8 * whole.saved_bytes
    assert_same(rehearse(path, plan, rank=1, steps=1), runs[1][1])


# Routers and buffers


def router(model):
    """(the weight of a router, its bias): a parameter and a persistent buffer."""
    gate = model.model.layers[1].mlp.gate
    return gate.weight.full_tensor().detach(), gate.e_score_correction_bias.clone()


def routers_of(path, plans):
    return [router(built(plan, path)) for plan in plans]


def test_routers_follow_the_plans_seed_and_are_equal_on_all_ranks():
    """By the model's own law; no layout or level changes the values."""
    path = path_of("deepseek_v3")
    plans = [plan_of(path, 2), plan_of(path, 2, params={"*": "parameters"}), plan_of(path, 2, seed=1)]
    ranks_own = on_ranks(2, routers_of, path, plans)
    one, sharded, other = ranks_own[0]
    assert dense.error(one[0], sharded[0]) == 0 and dense.error(one[0], other[0]) > 0.1
    for a, b in zip(*ranks_own, strict=True):
        assert dense.error(a[0], b[0]) == 0 and dense.error(a[1], b[1]) == 0
    assert 0.1 < one[0].std() < 0.3 and not one[1].any()


def through_files(path, plan, directory):
    """A router read from files, trained on, exported, saved and read back."""
    names = {}

    def loaded(folder):
        model = build_meta(load_config(path))
        names.update({module: name for name, module in model.named_modules()})
        return sw.parallelize(model, dense.mesh_of(**plan.mesh), plan, from_safetensors(folder, names))

    model = loaded(directory / "in")
    first = router(model)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias.add_(1)
    save_pretrained(model, directory / "out")
    state = RunState(step=1, seed=0, tokens=1, model=plan.model.sha256, plan="0" * 64)
    checkpoint.save(directory / "checkpoint", model, None, state)
    again = built(plan, path, Unfilled(torch.device("cpu")))
    checkpoint.load(directory / "checkpoint" / "step-00000001", again)
    return first, router(model), router(loaded(directory / "out")), router(again)


def test_routers_and_persistent_buffers_come_from_files_and_are_saved(tmp_path):
    path = path_of("deepseek_v3")
    torch.manual_seed(0)
    dense_model = transformers.AutoModelForCausalLM.from_config(load_config(path))
    gate = dense_model.model.layers[1].mlp.gate
    gate.e_score_correction_bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    (tmp_path / "in").mkdir()
    save_file(dense_model.state_dict(), tmp_path / "in" / "model.safetensors")
    expected = gate.weight.detach(), gate.e_score_correction_bias
    moved = expected[0], expected[1] + 1
    for found in on_ranks(2, through_files, path, plan_of(path, 2, params={"*": "parameters"}), tmp_path):
        for (weight, bias), (right, shift) in zip(found, (expected, moved, moved, moved), strict=True):
            assert dense.error(weight, right) == 0 and dense.error(bias, shift) == 0
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[1].mlp.gate
    assert dense.error(out.weight, moved[0]) == 0 and dense.error(out.e_score_correction_bias, moved[1]) == 0


def test_a_persistent_buffer_that_no_file_has_is_named(tmp_path):
    model = build_meta(load_config(path_of("deepseek_v3")))
    weights = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    del weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(sw.InputError, match="e_score_correction_bias: found no weight of that name; allowed: "):
        from_safetensors(tmp_path, {module: name for name, module in model.named_modules()})


def buffers_of(path, plan):
    return {name: buffer.dtype for name, buffer in built(plan, path).named_buffers()}


def test_buffers_have_the_types_of_a_model_made_in_the_computing_type():
    """Masters are float32; what the model's own code computes beside them is bfloat16 where it would be."""
    path = path_of("minimax")
    plan = plan_of(path, dtype="bfloat16", master_dtype="float32")
    expected = build_meta(load_config(path), "bfloat16").named_buffers()
    expected = {name: buffer.dtype for name, buffer in expected}
    assert on_ranks(1, buffers_of, path, plan) == [expected] and len(set(expected.values())) == 2
    assert rehearse(path, plan, steps=1).peak_bytes


def initialised(path, plan):
    mesh = dense.mesh_of(**plan.mesh)
    sw.Runtime.of(mesh, plan.backend)  # a mesh makes its groups when it is first asked
    model = build_meta(load_config(path))
    return record_initialisation(lambda: sw.parallelize(model, mesh, plan))[1]


@pytest.mark.parametrize("family", ["bamba", "deepseek_v3"])
def test_initialisation_is_rehearsed_too(family):
    """Whether the model's rule can be drawn by index or not: bamba's reads what it has drawn."""
    path = path_of(family)
    (real,) = on_ranks(1, initialised, path, plan_of(path))
    rehearsed = rehearse(path, plan_of(path), job="initialisation")
    assert rehearsed.events == real.events and rehearsed.storages == real.storages
