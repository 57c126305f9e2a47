"""Norm, embedding and loss against dense float64, with tokens and vocabulary split (ACCEPTANCE B2)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import shardwright as sw
from shardwright.layers.embedding import VocabParallelEmbedding
from shardwright.layers.loss import VocabParallelLoss
from shardwright.layers.norm import GridLayerNorm, GridRMSNorm
from shardwright.overlap.product import Product
from shardwright.params.stored import StoredParameter
from shardwright.reshard.carrier import tokens_of
from shardwright.runtime.runtime import Runtime
from shardwright.spec.mesh import chunk
from shardwright.values.placement import cut, make_parameter
from support import dense
from support.ranks import on_ranks

T, H, V = 24, 10, 48


def norm(axes, split, dtype=torch.float64):
    """Errors of y, dx, dw with tokens split over ``split``; and what forward saved."""
    mesh = dense.mesh_of(**axes)
    weight, x_whole, up = (dense.random(*shape, seed=i) for i, shape in enumerate([(H,), (T, H), (T, H)]))
    weight, x_whole = weight.to(dtype), x_whole.to(dtype)
    placements = [Shard(0) if axis in split else Replicate() for axis in axes]
    parameter = make_parameter(weight.clone(), (H,), mesh, [Replicate()] * mesh.ndim)
    layer = GridRMSNorm(StoredParameter(parameter, Runtime.of(mesh), tuple(split), "norm"), 1e-5)
    x = cut(x_whole, mesh, placements).requires_grad_()
    with sw.record(layer) as trace:
        y = layer(x.unsqueeze(0)).squeeze(0)
        y.backward(cut(up, mesh, placements).to(dtype))
    reference, w = x_whole.double().requires_grad_(), weight.double().requires_grad_()
    out = w * reference * torch.rsqrt(reference.square().mean(-1, keepdim=True) + 1e-5)
    out.backward(up)
    errors = [
        dense.error(dense.whole(y, mesh, placements).double(), out),
        dense.error(dense.whole(x.grad, mesh, placements).double(), reference.grad),
        dense.error(layer.weight.grad.to_local().double(), w.grad),
    ]
    return errors, trace.saved_bytes, x.shape[0], [c.kind for c in trace.collectives]


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        ({"data": 1, "tensor": 1}, ()),
        ({"data": 1, "tensor": 2}, ("tensor",)),
        ({"data": 1, "tensor": 3}, ("tensor",)),
        ({"data": 2, "tensor": 2}, ("data", "tensor")),
        ({"data": 2, "tensor": 2}, ("data",)),
        ({"data": 4, "tensor": 1}, ("data",)),
        ({"data": 4, "tensor": 2}, ("data", "tensor")),
    ],
)
def test_b2_norm_weight_gradient_equals_dense_on_every_rank(axes, split):
    for errors, saved, rows, kinds in on_ranks(axes["data"] * axes["tensor"], norm, axes, split):
        assert max(errors) <= 1e-12
        assert saved == rows * H * 8 + rows * 8  # x itself, and one number a row
        assert kinds == (["all_reduce"] if split else [])


def test_norm_in_bfloat16_takes_its_statistics_in_fp32():
    ((errors, *_),) = on_ranks(1, norm, {"data": 1, "tensor": 1}, (), torch.bfloat16)
    assert errors[0] < 0.05 and errors[1] < 0.05


def norm_of_ones(n):
    """The public case: 8 tokens of ones on two ranks give the single-device gradient on both, not half of it."""
    mesh = dense.mesh_of(tensor=n)
    parameter = make_parameter(torch.ones(4), (4,), mesh, [Replicate()])
    layer = GridRMSNorm(StoredParameter(parameter, Runtime.of(mesh), ("tensor",), "norm"), 0.0)
    layer(torch.ones(8 // n, 4)).sum().backward()
    return layer.weight.grad.to_local()


def test_norm_gradient_with_split_tokens():
    for gradient in on_ranks(2, norm_of_ones, 2):
        assert torch.equal(gradient, torch.full((4,), 8.0))


def embedding(axes, word, padding):
    mesh = dense.mesh_of(**axes)
    layout = sw.GridLayout(m=("data",), k=("tensor",), y=word)
    placements = [Replicate(), Shard(0)]
    table = dense.random(V, H, seed=0)
    local = cut(table, mesh, placements)
    parameter = make_parameter(local, (V, H), mesh, placements)
    product = Product.of("embedding", layout, mesh)
    product.runtime.arena.poison = True
    first = mesh.get_local_rank("tensor") * local.shape[0]
    stored = StoredParameter(parameter, product.runtime, ("data",), "embedding")
    layer = VocabParallelEmbedding(stored, product, first, padding)
    ids = torch.randint(0, V, (4, 6), generator=torch.Generator().manual_seed(3))
    ids[0, :3] = ids[3, 3:] = 5  # the same row from several tokens and data ranks
    up = dense.random(24, H, seed=1)
    rows = 4 // axes["data"]
    mine = ids[mesh.get_local_rank("data") * rows :][:rows]
    carrier = layer(mine)
    assert tuple(carrier.shape) == (rows, 6, H)
    tokens = tokens_of(carrier)
    split = [Shard(0), Shard(0) if word == "sharded" else Replicate()]
    tokens.squeeze(0).backward(cut(up, mesh, split))
    reference = torch.nn.Embedding(V, H, padding_idx=padding, _weight=table.clone(), dtype=torch.float64)
    out = reference(ids).view(24, H)
    out.backward(up)
    product.runtime.arena.poison = False
    y = dense.whole(tokens.squeeze(0), mesh, split)
    return torch.equal(y, out.detach()), dense.error(layer.weight.grad.full_tensor(), reference.weight.grad)


@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("word", ["sharded", "replicated"])
@pytest.mark.parametrize(
    "axes", [{"data": 1, "tensor": 1}, {"data": 1, "tensor": 4}, {"data": 2, "tensor": 2}, {"data": 1, "tensor": 3}]
)
def test_embedding_is_exact(axes, word, padding):
    for exact, worst in on_ranks(axes["data"] * axes["tensor"], embedding, axes, word, padding):
        assert exact and worst <= 1e-13


def loss(axes, labels, shift, dtype=torch.float64, given=""):
    mesh = dense.mesh_of(**axes)
    layer = VocabParallelLoss(mesh, ("tensor",), ("data",))
    whole = dense.random(T, V, seed=2) * 3 + shift
    placements = [Shard(0), Shard(1)]
    logits = cut(whole.to(dtype), mesh, placements).requires_grad_()
    mine = cut(labels, mesh, [Shard(0), Replicate()])
    count = (labels != -100).sum() if given else None
    count = int(count) if given == "number" else count
    with sw.record() as trace:
        share = layer(logits, mine, count)
        (share * 3).backward()
    total = share.detach().clone()
    torch.distributed.all_reduce(total, group=mesh.get_group("data"))
    reference = whole.to(dtype).double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(reference, labels, reduction="sum") / max(
        int((labels != -100).sum()), 1
    )
    (expected * 3).backward()
    gradient = dense.whole(logits.grad, mesh, placements)
    return (
        abs(total.item() - expected.item()),
        dense.error(gradient.double(), reference.grad),
        total.item(),
        [(c.kind, c.axes, c.size) for c in trace.collectives],
    )


LABELS = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(5))
AXES = [
    {"data": 1, "tensor": 1},
    {"data": 1, "tensor": 4},
    {"data": 2, "tensor": 2},
    {"data": 1, "tensor": 3},
    {"data": 4, "tensor": 1},
]


@pytest.mark.parametrize("shift", [0, 30, -30])
@pytest.mark.parametrize("axes", AXES)
def test_loss_and_gradient_equal_dense(axes, shift):
    labels = LABELS.clone()
    labels[::5] = -100
    labels[0:2] = torch.tensor([0, V - 1])
    rows = T // axes["data"]
    for off, worst, _, collectives in on_ranks(axes["data"] * axes["tensor"], loss, axes, labels, shift):
        assert off <= 1e-10 and worst <= 1e-10
        expected = []
        if axes["data"] > 1:
            expected.append(("all_reduce", ("data",), 8))
        if axes["tensor"] > 1:
            expected.append(("all_gather", ("tensor",), axes["tensor"] * 3 * rows * 8))
        assert collectives == expected


def test_all_targets_ignored_is_zero_with_zero_gradients():
    for axes in AXES:
        for off, worst, total, _ in on_ranks(axes["data"] * axes["tensor"], loss, axes, torch.full((T,), -100), 0):
            assert off == 0 and worst == 0 and total == 0.0


@pytest.mark.parametrize("given", ["tensor", "number"])
def test_the_count_can_be_given(given):
    for off, worst, _, collectives in on_ranks(4, loss, {"data": 2, "tensor": 2}, LABELS, 0, torch.float64, given):
        assert off <= 1e-10 and worst <= 1e-10 and [c[0] for c in collectives] == ["all_gather"]


def test_low_precision_logits_are_reduced_in_fp32():
    for off, worst, *_ in on_ranks(2, loss, {"data": 1, "tensor": 2}, LABELS, 0, torch.bfloat16):
        assert off <= 1e-5 and worst <= 1e-3


@pytest.mark.parametrize("axes", [{"data": 1, "tensor": 1}, {"data": 1, "tensor": 2}, {"data": 1, "tensor": 3}])
def test_an_offset_that_all_logits_share_costs_no_precision(axes):
    """The loss and its gradient are as exact as torch's own in fp32, whose errors stand beside them."""
    for shift in (0.0, 1e4, -1e4):
        logits = (dense.random(T, V, seed=2) * 3 + shift).float().requires_grad_()
        value = torch.nn.functional.cross_entropy(logits, LABELS)
        value.backward()
        exact = logits.detach().double().requires_grad_()
        reference = torch.nn.functional.cross_entropy(exact, LABELS)
        (reference * 3).backward()
        torchs = abs(value.item() - reference.item()), dense.error(logits.grad.double() * 3, exact.grad)
        for off, worst, *_ in on_ranks(axes["tensor"], loss, axes, LABELS, shift, torch.float32):
            assert off <= torchs[0] + 1e-6 and worst <= torchs[1] + 1e-7, (shift, off, worst, torchs)


def masked_part(n):
    """Classes from 20 on are masked off by −∞, which leaves whole ranks without any."""
    mesh = dense.mesh_of(tensor=n)
    whole = dense.random(6, V, seed=1)
    whole[:, 20:] = -torch.inf
    labels = torch.arange(6)
    logits = cut(whole, mesh, [Shard(1)]).requires_grad_()
    share = VocabParallelLoss(mesh, ("tensor",))(logits, labels)
    share.backward()
    whole.requires_grad_()
    reference = torch.nn.functional.cross_entropy(whole, labels)
    reference.backward()
    return dense.error(share, reference), dense.error(logits.grad, cut(whole.grad, mesh, [Shard(1)]))


def test_classes_that_are_masked_off_have_no_part_in_it():
    for errors in on_ranks(4, masked_part, 4):
        assert max(errors) <= 1e-12


def uniform(n):
    layer = VocabParallelLoss(dense.mesh_of(tensor=n), ("tensor",))
    return layer(torch.zeros(6, V // n, dtype=torch.float64), torch.arange(6)).item()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_zero_logits_give_the_logarithm_of_the_vocabulary(n):
    assert on_ranks(n, uniform, n) == pytest.approx([math.log(V)] * n, abs=1e-15)


def odd_vocabulary(n, vocab):
    """(local classes, loss of zero logits, worst gradient error, worst embedding error) of a vocabulary over n."""
    mesh = dense.mesh_of(tensor=n)
    first, end = chunk(vocab, n, mesh.get_rank())
    layer = VocabParallelLoss(mesh, ("tensor",))
    labels = torch.tensor([0, vocab - 1, vocab // 2, 5, -100, 1])
    zero = layer(torch.zeros(6, end - first, dtype=torch.float64), labels, vocab_size=vocab).item()
    whole = dense.random(6, vocab, seed=1)
    logits = whole[:, first:end].clone().requires_grad_()
    layer(logits, labels, vocab_size=vocab).backward()
    whole.requires_grad_()
    torch.nn.functional.cross_entropy(whole, labels).backward()
    worst = dense.error(logits.grad, whole.grad[:, first:end]) if end > first else 0.0
    layout = sw.GridLayout(k=("tensor",), y="replicated")
    table = dense.random(vocab, 4, seed=2)
    parameter = make_parameter(table[first:end].clone(), (vocab, 4), mesh, [Shard(0)])
    product = Product.of("embedding", layout, mesh)
    module = VocabParallelEmbedding(StoredParameter(parameter, product.runtime, (), "embedding"), product, first)
    ids = labels.clamp(min=0).view(2, 3)
    tokens = tokens_of(module(ids))
    tokens.backward(dense.random(1, 6, 4, seed=3))
    reference = torch.nn.Embedding(vocab, 4, _weight=table.clone())
    out = reference(ids)
    out.backward(dense.random(1, 6, 4, seed=3).view(2, 3, 4))
    local = module.weight.grad.to_local()
    off = dense.error(tokens.view(2, 3, 4), out)
    if end > first:
        off = max(off, dense.error(local, reference.weight.grad[first:end]))
    return end - first, zero, worst, off


@pytest.mark.parametrize(("n", "vocab"), [(2, 50257), (8, 50257), (4, 10), (8, 9), (3, 7)])
def test_a12_a_vocabulary_that_does_not_divide(n, vocab):
    answers = on_ranks(n, odd_vocabulary, n, vocab)
    if (n, vocab) == (2, 50257):
        assert [classes for classes, *_ in answers] == [25129, 25128]
        assert answers[0][1] == pytest.approx(10.824905, abs=1e-6)
    for _, zero, worst, off in answers:
        assert zero == pytest.approx(math.log(vocab), abs=1e-13)
        assert worst <= 1e-12 and off <= 1e-12


def layer_norm(axes, split):
    mesh = dense.mesh_of(**axes)
    weight, bias, x_whole, up = (dense.random(*shape, seed=i) for i, shape in enumerate([(H,), (H,), (T, H), (T, H)]))
    placements = [Shard(0) if axis in split else Replicate() for axis in axes]
    stored = [
        StoredParameter(make_parameter(value.clone(), (H,), mesh, [Replicate()] * 2), Runtime.of(mesh), split, "norm")
        for value in (weight, bias)
    ]
    layer = GridLayerNorm(*stored, 1e-5)
    x = cut(x_whole, mesh, placements).requires_grad_()
    y = layer(x)
    y.backward(cut(up, mesh, placements))
    reference = torch.nn.LayerNorm(H, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(weight)
        reference.bias.copy_(bias)
    x_whole.requires_grad_()
    out = reference(x_whole)
    out.backward(up)
    return max(
        dense.error(dense.whole(y, mesh, placements), out),
        dense.error(dense.whole(x.grad, mesh, placements), x_whole.grad),
        dense.error(layer.weight.grad.to_local(), reference.weight.grad),
        dense.error(layer.bias.grad.to_local(), reference.bias.grad),
    )


@pytest.mark.parametrize("split", [(), ("tensor",), ("data", "tensor")])
def test_layer_norm_equals_dense_with_tokens_split(split):
    assert max(on_ranks(4, layer_norm, {"data": 2, "tensor": 2}, split)) <= 1e-12


def far_from_zero(kind, axes, features, dtype):
    """Errors of y, dx, dw and db of rows with mean 1e4 and deviation 1, features split; saved bytes; collectives."""
    mesh, h = dense.mesh_of(**axes), 37
    x_whole = (dense.random(T, h, seed=1) + 1e4).to(dtype)
    weight, bias, up = (dense.random(*shape, seed=i).to(dtype) for i, shape in enumerate([(h,), (h,), (T, h)]))
    last = [Shard(1) if axis in features else Replicate() for axis in axes]
    first = [Shard(0) if axis in features else Replicate() for axis in axes]
    runtime = Runtime.of(mesh)
    stored = [
        StoredParameter(make_parameter(cut(value, mesh, first), (h,), mesh, first), runtime, (), "norm")
        for value in (weight, bias)
    ]
    split = runtime.group(features)
    layer = GridRMSNorm(stored[0], 1e-5, split=split) if kind == "rms" else GridLayerNorm(*stored, 1e-5, split)
    x = cut(x_whole, mesh, last).requires_grad_()
    with sw.record(layer, x) as trace:
        y = layer(x)
        y.backward(cut(up, mesh, last))
    wide = x_whole.double().requires_grad_()
    w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
    if kind == "rms":
        out = w * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    else:
        out = torch.nn.functional.layer_norm(wide, (h,), w, b, 1e-5)
    out.backward(up.double())
    pairs = [(y.detach(), out.detach(), last), (x.grad, wide.grad, last), (layer.weight.grad.to_local(), w.grad, first)]
    if kind == "layer":
        pairs.append((layer.bias.grad.to_local(), b.grad, first))
    errors = [
        dense.error(mine.double(), cut(whole, mesh, where)) / whole.abs().max().item() for mine, whole, where in pairs
    ]
    return errors, trace.saved_bytes, x.nbytes, [(c.phase, c.kind, c.size) for c in trace.collectives]


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_b1_features_split(kind):
    """37 features over 2, 3 and 2 × 2 ranks: fp32 within 1e-5, float64 exact; x is saved once, beside a few numbers."""
    for axes, features in (
        ({"i": 1, "l": 2}, ("l",)),
        ({"i": 1, "l": 3}, ("l",)),
        ({"i": 2, "l": 2}, ("l",)),
        ({"i": 2, "l": 2}, ("i", "l")),
    ):
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            for answer in on_ranks(axes["i"] * axes["l"], far_from_zero, kind, axes, features, dtype):
                errors, saved, own, collectives = answer
                assert max(errors) <= tolerance, (errors, axes, dtype)
                numbers = T * dtype.itemsize
                assert saved == own + numbers * (1 if kind == "rms" else 3)
                ranks = axes["l"] * (axes["i"] if "i" in features else 1)
                if kind == "rms":
                    assert collectives == [(phase, "all_reduce", numbers) for phase in ("forward", "backward")]
                else:
                    gathered = ("forward", "all_gather", 3 * numbers * ranks)
                    assert collectives == [gathered, ("backward", "all_reduce", 2 * numbers)]
