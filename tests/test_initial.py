"""The first weights: those of the model's own rule and the seed, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.errors import InputError
from shardwright.spec.mesh import chunk
from shardwright.values.initial import from_seed
from shardwright.values.placement import Cut
from shardwright.values.random import key_of, normal, trunc_normal, uniform
from test_random import correlation, whole

CPU = torch.device("cpu")


COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES = {
    "llama": COMMON | {"initializer_range": 0.05},
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "mistral": COMMON | {"pad_token_id": 5},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gemma2": COMMON | {"head_dim": 16, "pad_token_id": 0},
    "phi": COMMON | {"tie_word_embeddings": False},
}


def source_of(model, seed=0):
    return from_seed(model._init_weights, {module: name for name, module in model.named_modules()}, seed, CPU)


def parts(shape):
    """Cuts of a parameter as three ranks would hold them, along each dimension."""
    for dim, length in enumerate(shape):
        for rank in range(3):
            ranges = [((0, size),) for size in shape]
            ranges[dim] = (chunk(length, 3, rank),)
            yield Cut(tuple(shape), tuple(ranges))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_the_model_and_no_layout(family):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    own = dict(AutoModelForCausalLM.from_config(config).named_parameters(remove_duplicate=False))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    source = source_of(model)
    seen = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            drawn = source(module, name, whole(*parameter.shape))
            theirs = own[f"{prefix}.{name}"].detach()
            for cut in parts(parameter.shape):
                assert torch.equal(source(module, name, cut), cut.of(drawn)), f"{prefix}.{name}"
            std = float(theirs.std())
            if std == 0:
                assert torch.equal(drawn, theirs), f"{prefix}.{name}"
            else:
                count = drawn.numel()
                assert abs(float(drawn.mean())) < 5 * std / math.sqrt(count), f"{prefix}.{name}"
                assert float(drawn.std()) == pytest.approx(std, rel=7 / math.sqrt(count)), f"{prefix}.{name}"
                seen.setdefault(float(drawn.flatten()[-1]), set()).add(id(parameter))
                assert torch.equal((drawn == 0).all(-1), (theirs == 0).all(-1)), "the padding's row"
            assert drawn.dtype == parameter.dtype
    assert len(seen) > 10 and all(len(same) == 1 for same in seen.values())  # only tied ones start alike
    assert all(parameter.is_meta for parameter in model.parameters())


def test_no_family_needs_the_whole(monkeypatch):
    """All of the above came from rules that were heard, none from a whole drawn on the CPU."""
    monkeypatch.setattr("shardwright.values.initial._Rehearsal.really", None)
    for family, fields in FAMILIES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        source = source_of(model)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                source(module, name, whole(*parameter.shape))


def test_gpt2_scales_what_ends_a_block():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **FAMILIES["gpt2"]))
    source, mlp = source_of(model), model.transformer.h[1].mlp
    drawn = source(mlp.c_proj, "weight", whole(*mlp.c_proj.weight.shape))
    assert float(drawn.std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.03)
    assert float(source(mlp.c_fc, "weight", whole(*mlp.c_fc.weight.shape)).std()) == pytest.approx(0.02, rel=0.03)


def test_seed_and_name_tell_weights_apart():
    model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
    names = {module: name for name, module in model.named_modules()}

    def drawn(seed, which):
        source = from_seed(lambda module: isinstance(module, nn.Linear) and module.reset_parameters(), names, seed, CPU)
        return source(model[which], "weight", whole(40, 40)).flatten()

    assert torch.equal(drawn(0, "a"), drawn(0, "a"))
    for other in (drawn(1, "a"), drawn(0, "b")):
        assert abs(correlation(drawn(0, "a"), other)) < 5 / 40
    assert torch.equal(drawn(0, "a").view(40, 40), uniform(whole(40, 40), key_of(0, "a.weight"), torch.float32, CPU,
                                                           low=-1 / math.sqrt(40), high=1 / math.sqrt(40)))  # fmt: skip


def test_a_live_model_is_left_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    source = from_seed(scramble, dict.fromkeys(model.modules(), "m"), 0, CPU)
    source(model[0], "weight", whole(4, 3))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def scramble(module):
    for parameter in module.parameters():
        (nn.init.orthogonal_ if parameter.dim() > 1 else nn.init.ones_)(parameter)
    for buffer in module.buffers():
        buffer.fill_(9)


def by(rule, shape=(12, 8), cut=None, *, seed=0):
    """What ``from_seed`` gives a Linear inside a Sequential for a rule of its weight."""
    linear = nn.Linear(shape[1], shape[0], device="meta")
    model = nn.Sequential(linear)

    def initialise(module):
        if isinstance(module, nn.Linear):
            rule(module)

    source = from_seed(initialise, {module: name for name, module in model.named_modules()}, seed, CPU)
    return source(linear, "weight", cut or whole(*shape))


def both(weight):
    """A rule of the weight as one of the module: the bias is ones."""

    def rule(module):
        weight(module.weight)
        nn.init.ones_(module.bias)

    return rule


def test_truncated_normals_are_heard(monkeypatch):
    monkeypatch.setattr("shardwright.values.initial._Rehearsal.really", None)
    heard = by(both(lambda w: nn.init.trunc_normal_(w, mean=0.1, std=0.5, a=-1, b=0.4)))
    key = key_of(0, "0.weight")
    assert torch.equal(heard, trunc_normal(whole(12, 8), key, torch.float32, CPU, mean=0.1, std=0.5, a=-1, b=0.4))


def test_a_later_rule_takes_over(monkeypatch):
    monkeypatch.setattr("shardwright.values.initial._Rehearsal.really", None)

    def rule(w):
        w.data[2:4].fill_(7)
        w.data.mul_(3)
        w.data.normal_()
        w.data[5].zero_()
        w.data[9:11].fill_(2.0)

    one = normal(whole(12, 8), key_of(0, "0.weight"), torch.float32, CPU)
    one[5], one[9:11] = 0, 2
    assert torch.equal(by(both(rule)), one)
    cut = Cut((12, 8), (((4, 6), (0, 1), (6, 6), (10, 12)), ((1, 3), (5, 8))))
    assert torch.equal(by(both(rule), cut=cut), cut.of(one))


ODD = {
    "orthogonal": nn.init.orthogonal_,
    "scaled after": lambda w: nn.init.normal_(w).data.mul_(3),
    "copied": lambda w: w.data.copy_(torch.arange(96.0).view(12, 8)),
    "a column": lambda w: nn.init.normal_(w).data[:, 2].zero_(),
    "random rows": lambda w: nn.init.zeros_(w).data[2:4].normal_(),
    "transposed": lambda w: nn.init.normal_(w.data.t(), std=2),
    "seen as bits": lambda w: w.data.view(torch.int32).fill_(0x3F800000),
    "reads values": lambda w: nn.init.normal_(w, std=1.0 if float(nn.init.ones_(w).sum()) == 96 else 0.0),
    "heard, then not": lambda w: nn.init.sparse_(nn.init.ones_(w), 0.5),
}


@pytest.mark.parametrize("rule", ODD.values(), ids=ODD)
def test_what_cannot_be_drawn_by_index_is_drawn_whole(rule):
    torch.manual_seed(5)
    expected = torch.empty(12, 8)
    rule(expected)
    found = by(both(rule))
    assert torch.equal(by(both(rule)), found)
    assert torch.equal(by(both(rule), cut=Cut((12, 8), (((3, 9),), ((2, 5),)))), found[3:9, 2:5])
    assert torch.equal(found == 0, expected == 0) or rule is ODD["heard, then not"]
    # columns of an orthogonal matrix, known values, and spreads
    if rule is ODD["orthogonal"]:
        torch.testing.assert_close(found.T @ found, torch.eye(8))
    elif rule is ODD["copied"] or float(expected.std()) == 0:
        assert torch.equal(found, expected)
    else:
        assert float(found[found != 0].std()) == pytest.approx(float(expected[expected != 0].std()), rel=0.5)


def test_a_holder_of_the_module_has_the_last_word_for_real_too():
    model = nn.Sequential(nn.Linear(8, 12, device="meta"))

    def initialise(module):
        if isinstance(module, nn.Sequential):
            nn.init.orthogonal_(module[0].weight)
        else:
            nn.init.ones_(module.weight), nn.init.ones_(module.bias)

    source = from_seed(initialise, {module: name for name, module in model.named_modules()}, 0, CPU)
    weight = source(model[0], "weight", whole(12, 8))
    torch.testing.assert_close(weight.T @ weight, torch.eye(8))


def test_a_tensor_swapped_by_the_rule_counts():
    def rule(module):
        nn.init.normal_(module.weight)
        nn.init.ones_(module.bias)
        module.weight = nn.Parameter(torch.full((12, 8), 4.0))

    assert torch.equal(by(rule), torch.full((12, 8), 4.0))


def test_one_unknown_rule_takes_its_module_along():
    """A bias made from the weight's values belongs to the weight that is stored."""
    linear = nn.Linear(8, 12, device="meta")

    def initialise(module):
        nn.init.normal_(module.weight)
        module.bias.data.copy_(module.weight.data.sum(1))

    source = from_seed(initialise, {linear: "l"}, 3, CPU)
    weight, bias = source(linear, "weight", whole(12, 8)), source(linear, "bias", whole(12))
    assert torch.equal(weight.sum(1), bias)


@pytest.mark.parametrize("rule", [lambda w: None, lambda w: w.data[3].zero_()])
def test_a_parameter_without_a_rule_is_refused(rule):
    with pytest.raises(InputError, match=r"0\.weight: found no rule"):
        by(both(rule))
