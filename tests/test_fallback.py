"""Models without a rule table: their own code, loss and gradients; what is stated takes effect or is refused."""

from __future__ import annotations

import gc
import importlib

import pytest
import torch
from transformers.models.auto.configuration_auto import model_type_to_module_name

import shardwright as sw
from shardwright.simulate.rehearsal import rehearse
from support import ranks, tiny
from support.ranks import on_ranks
from support.reference import assert_same
from support.unruled import FAMILIES, REFUSED
from support.unsplit import BATCH, SEQUENCE, against_own_code, dense_of, errors_of, numbers, path_of, plan_of


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """Families are loaded here, and ranks forked afterwards: no rank loads them again."""
    for family in map(model_type_to_module_name, FAMILIES):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    ranks.drop(2)
    ranks.drop(1)
    gc.freeze()  # what is loaded is no garbage: a rehearsal collects, and looks through all that is not frozen


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
        ({"data": 3}, "replicate", {}, "micro_batch: found 4; allowed: a multiple of data = 3"),
    ],
)
def test_what_would_do_nothing_is_refused(axes, layout, changes, words):
    path = path_of("olmoe")
    try:
        plan = tiny.plan_of(axes, layout, path, micro_batch=BATCH, sequence=SEQUENCE, fallback=True, **changes)
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
