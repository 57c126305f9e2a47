"""Seeds: the same weights and the same dropped elements, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright import trace
from shardwright._errors import InputError
from shardwright.layers import dropout as dropout_file
from shardwright.layers.dropout import REMEMBERED, GridDropout
from shardwright.mesh import chunk
from shardwright.params import Cut, random
from shardwright.params.initial import from_seed
from shardwright.params.random import fold, hashed, key_of, normal, trunc_normal, uniform

CPU = torch.device("cpu")
DRAWS = 10**6


def whole(*shape):
    return Cut(shape, tuple(((0, length),) for length in shape))


def draws(law, *, key=None, count=DRAWS, **numbers):
    return law(whole(count), key_of(0, "w") if key is None else key, torch.float64, CPU, **numbers)


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def distance(sample, cumulative):
    """The Kolmogorov distance between a sample and a distribution function."""
    expected = cumulative(sample.sort().values)
    steps = torch.arange(len(sample) + 1, dtype=torch.float64) / len(sample)
    return float(torch.maximum(expected - steps[:-1], steps[1:] - expected).max())


def phi(x):
    return torch.special.ndtr(x)


@st.composite
def cuts(draw):
    """Whole tensors cut as layouts cut them: several pieces in a dimension, short and empty ones included."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    ranges = []
    for length in shape:
        pieces = []
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, length))
            pieces.append((start, draw(st.integers(start, length))))
        ranges.append(tuple(pieces))
    return Cut(shape, tuple(ranges))


# -- values by index --------------------------------------------------------------------------------------------------


def test_the_hash_is_splitmix():
    """Against the published definition, in Python's integers; the key's own arithmetic wraps around as torch's does."""
    key, mask = key_of(7, "w"), 2**64 - 1
    found = hashed(torch.tensor([0, 1, 2, 10**12, 2**62]), key).tolist()
    for index, bits in zip([0, 1, 2, 10**12, 2**62], found, strict=True):
        z = (key + index * random._step(key)) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        assert bits & mask == z ^ (z >> 31)


def test_the_hash_is_a_permutation_and_every_bit_is_fair():
    bits = hashed(torch.arange(DRAWS), key_of(0, "w"))
    assert len(bits.unique()) == DRAWS
    for place in range(64):
        assert abs(float(((bits >> place) & 1).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(DRAWS)


def test_a_normal_is_normal():
    x = draws(normal, mean=3.0, std=2.0)
    assert abs(float(x.mean()) - 3) < 5 * 2 / math.sqrt(DRAWS)
    assert abs(float(x.std()) - 2) < 5 * 2 / math.sqrt(2 * DRAWS)
    assert distance(x, lambda x: phi((x - 3) / 2)) < 1.95 / math.sqrt(DRAWS)  # exceeded by chance once in 1000
    assert 4.4 < float(((x - 3) / 2).abs().max()) < 6.5


def test_a_uniform_is_uniform():
    x = draws(uniform, low=-1.0, high=3.0)
    assert -1 < float(x.min()) < -1 + 1e-4
    assert 3 - 1e-4 < float(x.max()) < 3
    assert distance(x, lambda x: (x + 1) / 4) < 1.95 / math.sqrt(DRAWS)


@pytest.mark.parametrize("a, b", [(-2.0, 2.0), (0.5, 1.5), (-9.0, -1.0), (3.0, 9.0)])
def test_a_truncated_normal_is_one(a, b):
    x = draws(trunc_normal, mean=0.25, std=0.75, a=a, b=b)
    low, high = (phi(torch.tensor((bound - 0.25) / 0.75, dtype=torch.float64)) for bound in (a, b))
    assert a <= float(x.min()) and float(x.max()) <= b
    assert distance(x, lambda x: (phi((x - 0.25) / 0.75) - low) / (high - low)) < 1.95 / math.sqrt(DRAWS)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 1000, 4096])
def test_neighbours_do_not_correlate(lag):
    x = draws(normal)
    assert abs(correlation(x[:-lag], x[lag:])) < 5 / math.sqrt(DRAWS)
    assert abs(correlation(x[:-lag].square(), x[lag:].square())) < 5 / math.sqrt(DRAWS)


def test_keys_do_not_correlate():
    names = [f"model.layers.{layer}.weight" for layer in range(8)]
    keys = [key_of(0, "w"), key_of(1, "w"), *(key_of(0, name) for name in names)]
    keys += [fold(keys[0], count) for count in range(4)] + [0, 1, 2]  # neighbouring keys too
    rows = torch.stack([draws(normal, key=key, count=10**5) for key in keys])
    off = torch.corrcoef(rows) - torch.eye(len(keys))
    assert float(off.abs().max()) < 5 / math.sqrt(10**5)


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), at_once=st.integers(1, 40))
def test_every_cut_is_cut_from_one_whole(cut, dtype, at_once):
    before, random.CHUNK = random.CHUNK, at_once
    try:
        for law in (uniform, normal, trunc_normal):
            shard = law(cut, 11, dtype, CPU)
            assert shard.shape == cut.local_shape and shard.dtype == dtype
            assert torch.equal(shard, cut.of(law(whole(*cut.shape), 11, dtype, CPU)))
    finally:
        random.CHUNK = before


def test_a_large_cut_is_cut_from_one_whole():
    """Long enough that vector and scalar code, and two threads, take part."""
    one = normal(whole(1031, 1501), 5, torch.float64, CPU)
    cut = Cut((1031, 1501), (((3, 1000),), ((7, 501), (900, 1401))))
    assert torch.equal(normal(cut, 5, torch.float64, CPU), cut.of(one))


def test_little_stands_beside_the_shard(monkeypatch):
    monkeypatch.setattr(random, "CHUNK", 1000)
    with trace.record() as recorded:
        normal(Cut((400, 100), (((0, 400),), ((0, 50),))), 5, torch.float32, CPU)
    assert 4 * 20_000 < recorded.peak_bytes <= 4 * 20_000 + 40 * 1000


# -- the first weights ------------------------------------------------------------------------------------------------

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
    monkeypatch.setattr("shardwright.params.initial._Rehearsal.really", None)
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
    monkeypatch.setattr("shardwright.params.initial._Rehearsal.really", None)
    heard = by(both(lambda w: nn.init.trunc_normal_(w, mean=0.1, std=0.5, a=-1, b=0.4)))
    key = key_of(0, "0.weight")
    assert torch.equal(heard, trunc_normal(whole(12, 8), key, torch.float32, CPU, mean=0.1, std=0.5, a=-1, b=0.4))


def test_a_later_rule_takes_over(monkeypatch):
    monkeypatch.setattr("shardwright.params.initial._Rehearsal.really", None)

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


# -- dropout ----------------------------------------------------------------------------------------------------------

T, H = 24, 10


def at(row, column):
    return lambda x: (row, column, H)


def dropout(p=0.3, row=0, column=0, key=77):
    return GridDropout(p, key, at(row, column))


def mask_of(layer, rows=T, columns=H):
    return layer(torch.ones(1, rows, columns, dtype=torch.float64))[0] != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(p):
    layer = GridDropout(p, 3, lambda x: (0, 0, 1000))
    y = layer(torch.ones(1, 1000, 1000, dtype=torch.float64))
    assert set(y.unique().tolist()) == {0.0, 1 / (1 - p)}
    assert float(y.mean()) == pytest.approx(1, abs=5 * math.sqrt(p / (1 - p)) / 1000)
    rows, columns = y.mean(2).flatten(), y.mean(1).flatten()
    for means in (rows, columns):
        assert float(means.std()) == pytest.approx(math.sqrt(p / (1 - p) / 1000), rel=0.15)


def test_dropout_is_idle_where_it_should_be():
    x = torch.randn(1, T, H, dtype=torch.float64)
    assert GridDropout(0.0, 1, at(0, 0))(x) is x
    layer = dropout().eval()
    assert layer(x) is x and layer.calls == 0
    assert torch.equal(GridDropout(1.0, 1, at(0, 0))(x), torch.zeros_like(x))
    assert dropout()(x[:, :0]).shape == (1, 0, H)
    assert dropout()(x.to(torch.bfloat16)).dtype == torch.bfloat16


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 5), features=st.integers(1, 4), step=st.integers(0, 3), at_once=st.integers(1, 300))
def test_masks_of_parts_reassemble(tokens, features, step, at_once):
    def mask(layer, *size):
        layer.calls = step
        return mask_of(layer, *size)

    one = mask(dropout())
    before, dropout_file.CHUNK = dropout_file.CHUNK, at_once
    try:
        grid = [
            torch.cat([mask(dropout(row=r, column=c), stop - r, end - c) for c, end in split(H, features)], 1)
            for r, stop in split(T, tokens)
        ]
    finally:
        dropout_file.CHUNK = before
    assert torch.equal(torch.cat(grid), one)


def split(length, ranks):
    return [chunk(length, ranks, rank) for rank in range(ranks)]


def test_masks_differ_between_calls_layers_and_tokens():
    layer = GridDropout(0.5, key_of(0, "a.drop"), lambda x: (0, 0, 1000))
    other = GridDropout(0.5, key_of(0, "b.drop"), lambda x: (0, 0, 1000))
    further = GridDropout(0.5, key_of(0, "a.drop"), lambda x: (100, 0, 1000))
    masks = [mask_of(each, 100, 1000).flatten().double() for each in (layer, layer, other, further)]
    assert layer.calls == 2
    off = torch.corrcoef(torch.stack(masks)) - torch.eye(4)
    assert float(off.abs().max()) < 5 / math.sqrt(10**5)


def test_backward_drops_what_forward_dropped_and_saves_nothing():
    layer, saved = dropout(), []
    x = torch.randn(1, T, H, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(1, T, H, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    layer(x)  # a later call does not disturb it
    y.backward(upstream)
    assert not saved
    mask = (y != 0).double() / 0.7
    torch.testing.assert_close(y.detach(), x.detach() * mask, rtol=1e-15, atol=0)
    torch.testing.assert_close(x.grad, upstream * mask, rtol=1e-15, atol=0)


def test_gradients_that_do_not_lie_densely():
    layer = dropout()
    x = torch.randn(1, T, H, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0).double() * (1 / 0.7))


def block():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(H, H), dropout(key=1), nn.Tanh(), nn.Linear(H, H), dropout(key=2), nn.Linear(H, H)
    ).double()


def gradients(model, run, order):
    """Gradients of ``model`` for two forward passes whose backwards come in ``order``."""
    model.zero_grad()
    torch.manual_seed(1)
    inputs = [torch.randn(1, T, H, dtype=torch.float64) for _ in range(2)]
    upstream = [torch.randn(1, T, H, dtype=torch.float64) for _ in range(2)]
    outputs = [run(x) for x in inputs]
    if order == "together":
        sum((y * dy).sum() for y, dy in zip(outputs, upstream, strict=True)).backward()
    else:
        for index in order:
            outputs[index].backward(upstream[index])
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), "together"])
def test_a_replay_drops_the_same(order, early_stop):
    model = nn.Sequential(block(), block())
    expected = gradients(model, model, order)
    for layer in model.modules():
        if isinstance(layer, GridDropout):
            assert layer.calls == 2
            layer.calls = 0

    def run(x):
        for part in model:
            x = checkpoint(part, x, use_reentrant=False)
        return x

    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        found = gradients(model, run, order)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(layer.calls == 2 for layer in model.modules() if isinstance(layer, GridDropout))


def test_a_layer_that_several_regions_share():
    model = block()
    expected = gradients(model, lambda x: model(model(model(x))), (1, 0))
    model[1].calls = model[4].calls = 0

    def run(x):
        for _ in range(3):
            x = checkpoint(model, x, use_reentrant=False)
        return x

    found = gradients(model, run, (1, 0))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("last", [torch.sin, lambda x: x])
def test_a_region_inside_another(last):
    model, first = block(), nn.Linear(H, H).double()
    expected = gradients(model, lambda x: last(model(first(x))), (1, 0))
    model[1].calls = model[4].calls = 0

    def around(x):
        return last(checkpoint(model, first(x), use_reentrant=False))

    found = gradients(model, lambda x: checkpoint(around, x, use_reentrant=False), (1, 0))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_graph_that_is_kept_is_replayed_twice():
    model = block()
    x = torch.randn(1, T, H, dtype=torch.float64)
    y = checkpoint(model, x, use_reentrant=False)
    twice = [torch.autograd.grad(y.sum(), list(model.parameters()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


@pytest.mark.parametrize("ends", [True, False])
def test_dropout_at_the_edge_of_a_region(ends):
    """A mask drawn after the last node that waits is nobody's; one drawn first is found all the same."""
    part = block()[:2] if ends else block()[1:4]
    head = nn.Linear(H, H).double()
    model = nn.Sequential(part, head)
    expected = gradients(model, model, (0, 1))
    next(layer for layer in part if isinstance(layer, GridDropout)).calls = 0
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        found = gradients(model, lambda x: head(checkpoint(part, x, use_reentrant=False)), (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def refuse(run, match):
    with pytest.raises(RuntimeError, match=match):
        run(torch.randn(1, T, H, dtype=torch.float64, requires_grad=True)).sum().backward()


def test_replays_that_cannot_be_told_apart_are_refused():
    model = block()
    refuse(lambda x: checkpoint(lambda x: model(model(x)), x, use_reentrant=False), "second call")
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        refuse(lambda x: checkpoint(lambda x: checkpoint(model, x, use_reentrant=False), x, use_reentrant=False), "sec")
    refuse(lambda x: checkpoint(model, x, use_reentrant=True), "reentrant")


def test_a_replay_of_a_forgotten_call_is_refused():
    model = block()

    def run(x):
        y = checkpoint(model, x, use_reentrant=False)
        for _ in range(REMEMBERED):
            model[1](x)
            model[4](x)
        return y

    refuse(run, "before the last")


def test_a_rehearsal_does_what_the_run_does():
    def events(x, layer):
        with trace.record(x) as recorded:
            (layer(x) * 2).sum().backward()
        kinds = [type(event).__name__ + getattr(event, "op", getattr(event, "name", "")) for event in recorded.events]
        return recorded.peak_bytes, kinds

    real = events(torch.ones(1, T, H, requires_grad=True), dropout())
    with FakeTensorMode():
        assert events(torch.ones(1, T, H, requires_grad=True), dropout()) == real
