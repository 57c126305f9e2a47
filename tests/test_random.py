"""Values by index: laws, independence, and that every cut is cut from one whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import trace
from shardwright.values import random
from shardwright.values.placement import Cut
from shardwright.values.random import fold, hashed, key_of, normal, trunc_normal, uniform

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
