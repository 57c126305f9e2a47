"""Models without a rule table: their own code, loss and gradients; what is stated takes effect or is refused."""

from __future__ import annotations

import gc
import importlib

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import model_type_to_module_name

import dense
import ranks
import shardwright as sw
import tiny
from ranks import on_ranks
from reference import assert_same
from shardwright import models
from shardwright._rehearse import rehearse
from shardwright.models.export import save_pretrained
from shardwright.params import cut
from shardwright.params.initial import Unfilled
from shardwright.params.pretrained import from_safetensors
from shardwright.params.random import fold
from shardwright.step import record_initialisation, record_steps
from shardwright.train import checkpoint
from shardwright.train.manifest import RunState
from unruled import FAMILIES, REFUSED

BATCH, SEQUENCE = 4, 11


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """Families are loaded here, and ranks forked afterwards: no rank loads them again."""
    for family in map(model_type_to_module_name, FAMILIES):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    ranks.drop(2)
    ranks.drop(1)
    gc.freeze()  # what is loaded is no garbage: a rehearsal collects, and looks through all that is not frozen


def path_of(family, **changes):
    return tiny.write_config({"model_type": family, **FAMILIES[family], **changes})


def plan_of(path, ranks=1, **changes):
    changes = {"batch": BATCH, "sequence": SEQUENCE, "fallback": True, **changes}
    return tiny.plan_of({"data": ranks}, "replicate", path, **changes)


def numbers(seed):
    return torch.randint(3, 40, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def rows_of(mesh, whole):
    """This rank's rows of a batch."""
    place = sw.Runtime.of(mesh).group(("data",))
    return whole.chunk(place.size)[place.index].clone()


def dense_of(model, path, attention="eager"):
    """The unmodified model with the values of a parallelized one."""
    config = models.load_config(path)
    config.use_cache = False
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    reference.load_state_dict(whole)
    return reference.train()


def errors_of(model, mesh, reference, **more):
    """The largest errors of loss and gradients of a training forward, against the reference on the whole batch."""
    ids, labels = numbers(1), numbers(2)
    labels[:, 2:4] = -100
    if "attention_mask" in more:
        labels[more["attention_mask"] == 0] = -100
    count, own = (labels != -100).sum(), rows_of(mesh, labels)
    given = {name: rows_of(mesh, value) for name, value in more.items()}
    ours = rows_of(mesh, ids)
    loss = model(input_ids=ours, labels=own, shift_labels=own, num_items_in_batch=count, **given).loss
    loss.backward()
    logits = reference(input_ids=ids, **more).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    errors = {"loss": dense.error(total, expected)}
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        local = torch.zeros_like(ours.to_local()) if ours.grad is None else ours.grad.to_local()
        scale = max(1e-3, wanted.abs().max().item())
        if local.numel():
            errors[name] = dense.error(local, cut(wanted, ours.device_mesh, ours.placements)) / scale
    model.zero_grad()
    return errors


def against_own_code(path, plan):
    model, mesh = tiny.build(plan, path)
    step = sw.TrainStep(model, mesh, plan)
    _, trace = record_steps(step, [[(rows_of(mesh, numbers(3)), rows_of(mesh, numbers(4)))]])
    return errors_of(model, mesh, dense_of(model, path)), trace


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_by_its_own_code_and_rehearsed(family):
    """Loss and every gradient on two ranks; the rehearsal has the run's events and peaks."""
    path = path_of(family)
    plan = plan_of(path, 2, params={"*": "parameters"})
    runs = on_ranks(2, against_own_code, path, plan)
    for errors, _ in runs:
        assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)
    rank = list(FAMILIES).index(family) % 2
    assert_same(rehearse(path, plan, rank=rank, steps=1), runs[rank][1])


# What is stated takes effect, or is refused


def refused(path, plan, words):
    with pytest.raises(sw.InputError, match=words) as caught:
        rehearse(path, plan)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value) and "allowed: " in str(caught.value)


def given(path, plan, more):
    try:
        model, mesh = tiny.build(plan, path)
        return errors_of(model, mesh, dense_of(model, path), **more)
    except sw.InputError as error:
        return str(error)


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_code_does_not_fit_are_refused(family):
    fields, words = REFUSED[family]
    path = tiny.write_config({"model_type": family, **fields})
    (line,) = on_ranks(1, given, path, plan_of(path), {})
    assert words in line and len(line) <= 300 and "allowed: " in line


@pytest.mark.parametrize(
    ("axes", "layout", "changes", "words"),
    [
        ({"data": 2, "tensor": 2}, "replicate", {}, "mesh: found 2 ranks on 'tensor'; allowed: axes that split the"),
        ({"data": 2, "tensor": 1}, "sequence-parallel", {}, r"layouts.\*: found sequence-parallel; allowed: replicate"),
        ({"data": 2}, sw.GridLayout(m="data", w="sharded"), {}, r"layouts.\*: found .*; allowed: replicate"),
        ({"data": 2}, "replicate", {"recompute": {"model.layer.*": "block"}}, "recompute"),
        ({"data": 3}, "replicate", {}, "batch: found 4; allowed: a multiple of data = 3"),
    ],
)
def test_what_would_do_nothing_is_refused(axes, layout, changes, words):
    path = path_of("olmoe")
    try:
        plan = tiny.plan_of(axes, layout, path, batch=BATCH, sequence=SEQUENCE, fallback=True, **changes)
    except sw.InputError:
        pytest.fail("the plan itself is fine")
    refused(path, plan, words)


def test_code_that_looks_at_values_cannot_be_rehearsed():
    fields = {
        **FAMILIES["deepseek_v3"],
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 1,
    }
    path = tiny.write_config({"model_type": "longcat_flash", **fields})
    refused(path, plan_of(path), "rehearse: found aten.nonzero.default, whose result depends on values; allowed: ")


@pytest.mark.parametrize("name", ["output_attentions", "output_router_logits"])
def test_outputs_beside_the_logits_are_refused(name):
    """The loss of routers is a mean over the tokens of one rank, and no share of a sum."""
    path = path_of("mixtral", **{name: True})
    refused(path, plan_of(path), f"{name}: found True; allowed: False")
    path = tiny.config_path(**{name: True})
    refused(path, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", path), f"{name}: found True; allowed: False")


def test_masks_and_positions_reach_the_models_own_code():
    """Padding on either side, and documents packed by positions: as eager attention has it."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[0, :4], mask[1, 6:] = 0, 0
    packed = torch.cat([torch.arange(5), torch.arange(SEQUENCE - 5)]).expand(BATCH, -1)
    for family in ("gpt_oss", "starcoder2"):
        path = path_of(family)
        for more in ({"attention_mask": mask}, {"position_ids": packed}, {"attention_mask": torch.ones_like(mask)}):
            for errors in on_ranks(2, given, path, plan_of(path, 2), more):
                assert max(errors.values()) <= 1e-5, errors


def test_keywords_that_the_models_code_would_swallow_are_refused():
    for family, name in (("starcoder2", "cu_seq_lens_q"), ("bloom", "position_ids"), ("gpt_oss", "token_type_ids")):
        path = path_of(family)
        (line,) = on_ranks(1, given, path, plan_of(path), {name: numbers(1)})
        assert line.startswith(f"{name}: found "), line


def changed_positions(path, plan):
    """Where logits move when the first document does: [S] booleans."""
    model, _ = tiny.build(plan, path)
    ids = numbers(1)[:1, :10]
    positions = torch.arange(5).repeat(2)[None]
    other = ids.clone()
    other[0, :5] = (other[0, :5] - 3 + 1) % 37 + 3
    with torch.no_grad():
        a, b = (model(input_ids=each, position_ids=positions).logits for each in (ids, other))
    return ((a - b).abs().amax(-1)[0] > 1e-6).tolist()


def test_a_packed_document_moves_itself_only():
    path = path_of("starcoder2")
    assert on_ranks(1, changed_positions, path, plan_of(path))[0] == [True] * 5 + [False] * 5


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


def recomputed(path, plan):
    model, mesh = tiny.build(plan, path)
    step = sw.TrainStep(model, mesh, plan)
    _, trace = record_steps(step, [[(rows_of(mesh, numbers(3)), rows_of(mesh, numbers(4)))]])
    return errors_of(model, mesh, dense_of(model, path)), trace


@pytest.mark.parametrize("family", ["deepseek_v3", "starcoder2"])
def test_recomputed_blocks_take_effect(family):
    """Less is saved, gradients are the model's own, and it is rehearsed."""
    path = path_of(family)
    plan = plan_of(path, 2, params={"*": "parameters"}, recompute={"model.layers.1": "block"})
    runs = on_ranks(2, recomputed, path, plan)
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


def built(plan, path, source=None):
    mesh = dense.mesh_of(**plan.mesh)
    return sw.parallelize(models.build_meta(models.load_config(path)), mesh, plan, source)


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
        model = models.build_meta(models.load_config(path))
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
    dense_model = transformers.AutoModelForCausalLM.from_config(models.load_config(path))
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
    model = models.build_meta(models.load_config(path_of("deepseek_v3")))
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
    expected = models.build_meta(models.load_config(path), "bfloat16").named_buffers()
    expected = {name: buffer.dtype for name, buffer in expected}
    assert on_ranks(1, buffers_of, path, plan) == [expected] and len(set(expected.values())) == 2
    assert rehearse(path, plan, steps=1).peak_bytes


def initialised(path, plan):
    mesh = dense.mesh_of(**plan.mesh)
    sw.Runtime.of(mesh, plan.backend)  # a mesh makes its groups when it is first asked
    model = models.build_meta(models.load_config(path))
    return record_initialisation(lambda: sw.parallelize(model, mesh, plan))[1]


@pytest.mark.parametrize("family", ["bamba", "deepseek_v3"])
def test_initialisation_is_rehearsed_too(family):
    """Whether the model's rule can be drawn by index or not: bamba's reads what it has drawn."""
    path = path_of(family)
    (real,) = on_ranks(1, initialised, path, plan_of(path))
    rehearsed = rehearse(path, plan_of(path), job="initialisation")
    assert rehearsed.events == real.events and rehearsed.storages == real.storages
