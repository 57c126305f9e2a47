"""Dropout: the same elements are dropped whatever the layout, in forward, backward and a replay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardwright import trace
from shardwright.layers import dropout as dropout_file
from shardwright.layers.dropout import REMEMBERED, GridDropout
from shardwright.spec.mesh import chunk
from shardwright.values.random import key_of

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
