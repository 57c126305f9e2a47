"""A Hugging Face Llama whose parameters are stored by level: curves, rehearsals, recomputation (C16, D1, F1)."""

from __future__ import annotations

import functools

import pytest

import tiny
from ranks import on_ranks
from reference import assert_same
from shardwright._rehearse import rehearse

LEVELS = {
    "replicate": "replicate",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "parameters": "parameters",
    "kept": {"level": "parameters", "keep": True},
}
MESHES = [
    ({"data": 2, "tensor": 1}, "replicate"),
    ({"data": 3, "tensor": 1}, "replicate"),
    ({"data": 2, "tensor": 2}, "sequence-parallel"),
    ({"data": 2, "tensor": 2}, "tensor-all-reduce"),
    ({"data": 2, "tensor": 2}, "sequence-parallel-async"),
    ({"data": 2, "tensor": 2}, "sequence-parallel-ring"),
]


@functools.cache
def single_rank_curve():
    return on_ranks(1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate"), 6)[0][0]


def assert_trains_alike(plan, steps=6):
    runs = on_ranks(plan.world_size, tiny.train, plan, steps, 2)
    reference = single_rank_curve()[:steps]
    for rank, (losses, real) in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) <= 1e-5
        assert_same(rehearse(tiny.config_path(), plan, rank=rank), real)
    return runs[0][1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("axes", "layout"), MESHES)
def test_every_level_trains_alike_and_is_rehearsed(axes, layout, level):
    if (axes["data"], level) in ((3, "kept"), (3, "optimizer")):
        return
    assert_trains_alike(tiny.plan_of(axes, layout, params={"*": LEVELS[level]}))
