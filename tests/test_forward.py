"""What a forward pass is told takes effect, or is refused by name: keywords of the model, of attention, of the loss."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwright as sw
from shardwright.families.table import has_rule
from shardwright.layers import attention
from shardwright.models.config import load_config
from shardwright.models.forward import OFF, UNDERSTOOD, BeginForward, CausalLoss
from shardwright.reshard.carrier import TokenShape
from shardwright.simulate.rehearsal import rehearse
from support import tiny
from support.ranks import on_ranks
from test_families import FAMILIES


class Head:
    tokens = 0


IDS = torch.zeros(2, 6, dtype=torch.int64)
ONES, POSITIONS = torch.ones_like(IDS), torch.arange(6)


def begin(*args, **kwargs):
    """The keywords that the model gets."""
    return BeginForward(TokenShape(), Head())(nn.Identity(), args, kwargs)[1]


@pytest.mark.parametrize(
    "more",
    [
        {"attention_mask": ONES},
        {"attention_mask": ONES.bool(), "position_ids": POSITIONS.expand(2, 6)},
        {"position_ids": POSITIONS[None]},
        {
            "use_cache": False,
            "output_attentions": None,
            "logits_to_keep": 0,
            "return_dict": True,
            "cu_seq_lens_q": None,
        },
    ],
)
def test_what_collators_send_says_what_holds_anyway(more):
    assert not {"attention_mask", "position_ids"} & set(begin(input_ids=IDS, labels=IDS, **more))


def zero_at(whole, row, column):
    whole = whole.clone()
    whole[row, column] = 0
    return whole


REFUSED = {
    "attention_mask": [zero_at(ONES, 1, 5), zero_at(ONES, 0, 0), ONES[:, :5], ONES[:, None, None], 3],
    "position_ids": [IDS, POSITIONS.flip(0), POSITIONS[None, :5]],
    "cu_seq_lens_q": [torch.tensor([0, 8, 16])],
    "cu_seq_lens_k": [torch.tensor([0, 8, 16])],
    "token_type_ids": [IDS],
    "inputs_embeds": [torch.zeros(2, 6, 4)],
    "past_key_values": [object()],
    "use_cache": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "output_router_logits": [True],
    "logits_to_keep": [1, torch.tensor([0])],
    "a_word_of_tomorrow": [0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_keyword_is_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(sw.InputError, match=f"^{name}: found .*; allowed: ") as caught:
            begin(input_ids=IDS, labels=IDS, **{name: value})
        assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_masks_without_values_are_refused():
    with FakeTensorMode(), pytest.raises(sw.InputError, match=r"attention_mask: found .*no values"):
        begin(input_ids=torch.zeros(2, 6, dtype=torch.int64), attention_mask=torch.ones(2, 6))


@pytest.mark.parametrize("args", [(IDS, ONES), (), (None,)])
def test_ids_alone_may_be_given_by_position(args):
    with pytest.raises(sw.InputError, match=r"^(forward|input_ids): found"):
        begin(*args)


def masked(more):
    plan = tiny.plan_of({"data": 1, "tensor": 1}, "replicate")
    model, _ = tiny.build(plan)
    ids = tiny.batches(plan, 1)[0][0][0]
    more = {"ones": {"attention_mask": torch.ones_like(ids)}, "packed": {"cu_seq_lens_q": torch.tensor([0, 8, 16])}}[
        more
    ]
    plain = model(input_ids=ids, labels=ids).loss
    try:
        return plain.item(), model(input_ids=ids, labels=ids, **more).loss.item()
    except sw.InputError as error:
        return str(error)


def test_a_whole_model_takes_a_mask_of_ones_and_refuses_packed_documents():
    ((plain, with_ones),) = on_ranks(1, masked, "ones")
    assert plain == with_ones
    assert on_ranks(1, masked, "packed")[0].startswith("cu_seq_lens_q: found ")


# Attention


def calls():
    """The syntax trees of all calls of attention_interface in the installed transformers."""
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        for found in re.finditer(r"(?<![\w.])attention_interface\(", text):
            depth, end = 1, found.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            yield ast.parse(text[found.start() : end], mode="eval").body


def heads(count=4):
    return [torch.randn(2, n, 6, 8, generator=torch.Generator().manual_seed(n)) for n in (count, 2, 2)]


def attend(**keywords):
    return attention.causal_attention(nn.Identity(), *heads(), None, **keywords)


def test_every_keyword_that_transformers_hands_to_attention_is_understood_or_refused():
    found = {keyword.arg for call in calls() for keyword in call.keywords} - {None}
    assert {"scaling", "dropout", "cu_seq_lens_q", "position_bias", "s_aux", "sinks", "indices"} <= found
    parameters = inspect.signature(attention.causal_attention).parameters
    understood = found & {*parameters, *attention.UNREAD}
    assert understood == {
        "attention_mask", "dropout", "is_causal", "key", "position_ids", "query", "scaling", "sliding_window",
        "softcap", "value",
    }  # fmt: skip
    for name in found - understood:
        for value in (torch.ones(4), True, 1):
            with pytest.raises(sw.InputError, match=f"^attention: found {name}; allowed: "):
                attend(**{name: value})


def test_attention_does_what_it_understands():
    """Numbers of each understood keyword, in float64."""
    query, key, value = (each.double() for each in heads())
    plain = attention.causal_attention(nn.Identity(), query, key, value, None)[0]
    for keywords in ({"scaling": 0.3}, {"sliding_window": 2}, {"softcap": 0.5}, {"scaling": 0.3, "softcap": 2.0}):
        result = attention.causal_attention(nn.Identity(), query, key, value, None, **keywords)[0]
        scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * keywords.get("scaling", 8**-0.5)
        if "softcap" in keywords:
            scores = keywords["softcap"] * torch.tanh(scores / keywords["softcap"])
        far = torch.arange(6)[:, None] - torch.arange(6)
        scores = scores.masked_fill((far < 0) | (far >= keywords.get("sliding_window", 6)), -torch.inf)
        expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
        assert (result - expected).abs().max() <= 1e-12
        assert (result - plain).abs().max() > 1e-3


def test_what_asks_for_nothing_is_understood():
    attend(sinks=None, output_attentions=False, use_cache=False, position_ids=torch.ones(2, 6), is_causal=True)
    with pytest.raises(sw.InputError, match="attention: found attention_mask; allowed: "):
        attention.causal_attention(nn.Identity(), *heads(), torch.ones(2, 1, 6, 6))
    with pytest.raises(sw.InputError, match="attention: found is_causal=False; allowed: "):
        attend(is_causal=False)
    module = nn.Identity()
    module.is_causal = False
    with pytest.raises(sw.InputError, match="attention: found is_causal=False; allowed: "):
        attention.causal_attention(module, *heads(), None)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.1: found 'chunked_attention'"),
        ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "layer_types.0: found 'linear_attention'"),
        ("llama", {"is_causal": False}, "is_causal: found False; allowed: True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found True; allowed: False"),
    ],
)
def test_attention_of_other_kinds_is_refused_when_planning(family, changes, words):
    path = tiny.write_config({"model_type": family, **FAMILIES[family], **changes})
    with pytest.raises(sw.InputError, match=words) as caught:
        rehearse(path, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", path))
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


# The loss


def loss_of(**more):
    loss = CausalLoss(lambda logits, labels, count, classes: logits.float().mean())
    return loss, loss(torch.zeros(2, 6, 5, requires_grad=True), IDS, 5, **more)


def test_the_loss_refuses_what_asks_for_another():
    loss_of(ignore_index=-100, use_cache=False, shift_labels=IDS)
    for more in ({"ignore_index": 0}, {"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"weight": torch.ones(40, 40)}):
        with pytest.raises(sw.InputError, match=f"loss: found {next(iter(more))}=") as caught:
            loss_of(**more)
        assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_a_model_may_not_add_to_the_loss():
    kwargs = {"labels": IDS}
    loss, made = loss_of()
    loss.check(nn.Identity(), (), kwargs, (made, 0))
    for spoil, words in (
        (lambda made: made + 1, "a loss of the model's own"),
        (lambda made: made.add_(1), "a loss to which the model adds another"),
        (lambda made: None, "none"),
    ):
        loss, made = loss_of()
        with pytest.raises(sw.InputError, match=f"^Identity: found {words}; allowed: "):
            loss.check(nn.Identity(), (), kwargs, (spoil(made),))


def test_names_of_keywords_are_those_of_models():
    """What is understood or off is a parameter of some model's forward, or of its loss."""
    taken = set(inspect.signature(transformers.MixtralForCausalLM.forward).parameters)
    taken |= set(inspect.signature(transformers.loss.loss_utils.ForCausalLMLoss).parameters)
    assert set(UNDERSTOOD) | set(OFF) <= taken | {"return_dict", "output_attentions", "output_hidden_states"}
    assert has_rule(load_config(tiny.config_path()))
