"""Stretched rehearsals equal full ones, event by event; what is not periodic is not stretched (ACCEPTANCE E2, E9)."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwright.stretching.runs
from shardwright.errors import InputError
from shardwright.families.table import family_of
from shardwright.models.config import load_config
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec.plan import Plan
from shardwright.stretching import stretch
from shardwright.stretching.bucket_period import bucket_period, cap_of
from shardwright.stretching.repeat import Repeat, repeated
from shardwright.stretching.runs import runs
from shardwright.stretching.segments import NotPeriodic
from shardwright.stretching.stretch import rehearse_stretched
from shardwright.trace import Collective, Op, Trace, Wait
from support import tiny
from support.marks import slow_in
from test_families import FAMILIES

SHARDED = {"*": {"level": "parameters"}}
KEPT = {"*": {"level": "parameters", "keep": True}}
BLOCKS = {"*": "block"}


def path_of(family: str, blocks: int) -> Path:
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return tiny.write_config({"model_type": family, **FAMILIES[family], name: blocks})


def case(
    family: str = "llama", blocks: int = 6, overlap: str = "blocking", bins: int = 0, **settings
) -> tuple[Path, Plan]:
    path = path_of(family, blocks)
    settings = {"micro_batch": 4, "sequence": 8, "in_flight": 1, **settings}
    plan = tiny.plan_of({"data": 2, "tensor": 2}, settings.pop("layout", "sequence-parallel"), path, **settings)
    if overlap != "blocking":
        config = load_config(path)
        sites = family_of(config).sites(config, plan.micro_batch * plan.sequence)
        plan = plan.evolve(layouts={s.name: replace(plan.layout_for(s), overlap=overlap) for s in sites})
    if bins:
        plan = plan.evolve(bucket=cap_of(load_config(path), plan, bins))
    return path, plan


CASES = {
    "replicate": {"params": {"*": "replicate"}, "recompute": BLOCKS},
    "optimizer": {"params": {"*": "optimizer"}, "accumulation": 2, "backend": "nccl"},
    "gradients": {"params": {"*": "gradients"}, "overlap": "async"},
    "parameters": {"params": SHARDED, "recompute": BLOCKS, "overlap": "ring", "dtype": "bfloat16"},
    "kept": {"params": KEPT, "backend": "nccl"},
    "three in flight": {"params": SHARDED, "in_flight": 3, "blocks": 9, "backend": "nccl"},
    "gpt2": {"family": "gpt2", "params": SHARDED, "layout": "tensor-all-reduce"},
    "qwen3": {"family": "qwen3", "params": SHARDED, "backend": "nccl", "recompute": BLOCKS, "master_dtype": "float64"},
    "unlike neighbours": {"family": "gemma2", "params": SHARDED, "blocks": 8, "backend": "nccl"},
    "two runs": {"params": SHARDED, "blocks": 10, "recompute": {"model.layers.[0-4]": "block"}, "backend": "nccl"},
    "a bucket": {"params": SHARDED, "blocks": 16, "bins": 2},
    "a bucket, whole": {"params": {"*": "replicate"}, "blocks": 9, "bins": 1, "backend": "nccl"},
    "a bucket, two micro-batches": {"params": {"*": "gradients"}, "blocks": 12, "bins": 1, "accumulation": 2},
    "a bucket, unlike biases": {"family": "gpt2", "params": SHARDED, "blocks": 9, "bins": 1, "dtype": "bfloat16"},
    "a bucket, unlike neighbours": {"family": "gemma2", "params": SHARDED, "blocks": 14, "bins": 1},
    "a bucket, two runs": {"params": KEPT, "blocks": 18, "bins": 1, "recompute": {"model.layers.[0-8]": "block"}},
}


@pytest.mark.parametrize("name", slow_in(["optimizer", "gradients", "qwen3", "a bucket, two runs"], CASES))
def test_a_stretched_rehearsal_is_the_full_one(name, monkeypatch):
    path, plan = case(**CASES[name])
    seen = blocks_rehearsed(monkeypatch)
    stretched = rehearse_stretched(path, plan, rank=1)
    full = rehearse(path, plan, rank=1)
    assert seen and max(seen) < load_config(path).num_hidden_layers, "nothing was stretched"
    assert stretched.events == full.events
    assert stretched.storages == full.storages
    assert stretched.saved == full.saved
    assert stretched.arena == full.arena


def blocks_rehearsed(monkeypatch) -> list[int]:
    """How many blocks each rehearsal from now on has, as they come."""
    seen: list[int] = []

    def spy(config, *rest):
        seen.append(config.num_hidden_layers)
        return rehearse(config, *rest)

    for module in (stretch, shardwright.stretching.runs):
        monkeypatch.setattr(module, "rehearse", spy)
    return seen


def test_a_bucket_that_does_not_come_round_with_blocks_is_rehearsed_as_it_is(monkeypatch):
    path, plan = case(params=SHARDED, bucket=2000, backend="nccl")
    seen = blocks_rehearsed(monkeypatch)
    stretched, full = rehearse_stretched(path, plan), rehearse(path, plan)
    assert seen == [6]
    assert (stretched.events, stretched.storages, stretched.saved) == (full.events, full.storages, full.saved)


def test_a_short_model_is_rehearsed_as_it_is(monkeypatch):
    path, plan = case(blocks=4, params=SHARDED, backend="nccl")
    seen = blocks_rehearsed(monkeypatch)
    assert rehearse_stretched(path, plan).events
    assert seen == [4]


@functools.cache
def few() -> Trace:
    return rehearse(*case(blocks=4, params=SHARDED, backend="nccl"))


def test_what_is_not_periodic_is_named():
    trace = few()
    events = list(trace.events)
    place = max(i for i, e in enumerate(events) if isinstance(e, Op) and e.module == "model.layers.2.mlp.down_proj")
    events[place] = replace(events[place], name="aten.odd.default")
    with pytest.raises(NotPeriodic, match=r"blocks 1 and 2 do not do the same in step 2, backward.*aten\.odd\.default"):
        repeated(Trace(events, trace.storages, trace.saved), "model.layers", [Repeat(1, 1, 3)])


def test_other_neighbours_than_the_middle_ones_are_not_alike():
    with pytest.raises(NotPeriodic, match="blocks 0 and 1"):
        repeated(few(), "model.layers", [Repeat(0, 1, 3)])


def test_no_copies_change_nothing():
    assert repeated(few(), "model.layers", [Repeat(1, 1, 0)]) is few()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaaa", [(0, 5, 1)]),
        ("ababab", [(0, 6, 2)]),
        ("aaabbbb", [(0, 3, 1), (3, 4, 1)]),
        ("xaaaa", [(0, 1, 1), (1, 4, 1)]),
        ("aabaabaab", [(0, 9, 3)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("ababcccc", [(0, 4, 2), (4, 4, 1)]),
    ],
)
def test_runs_are_as_long_as_can_be(kinds, expected):
    assert [(run.start, run.length, run.period) for run in runs(kinds)] == expected


# -- what a rehearsal can be asked for ---------------------------------------------------------------------------------


def test_a_step_may_have_fewer_micro_batches_than_the_plan():
    """The second step is then the one that follows steps of the plan."""
    path, plan = case(accumulation=3, params=SHARDED)
    short, whole = rehearse(path, plan, steps=(1, 3)), rehearse(path, plan)

    def of_step(trace: Trace, step: int) -> list:
        return [event for event in trace.events if event.step == step and isinstance(event, (Op, Collective, Wait))]

    assert of_step(short, 2) == of_step(whole, 2)
    losses = [event.phase == "loss" for event in of_step(short, 1)]
    assert sum(now and not before for before, now in itertools.pairwise(losses)) == 1
    micro_batch = 2 * plan.micro_batch // 2 * plan.sequence * torch.int64.itemsize  # tokens and labels, over data
    assert short.peak_bytes == whole.peak_bytes - 2 * micro_batch


def test_on_nccl_a_gathered_input_is_multiplied_as_one():
    """It arrives as one there; on gloo each rank's part is multiplied when it has come."""

    def products(overlap: str, backend: str) -> int:
        path, plan = case(overlap=overlap, backend=backend)
        trace = rehearse(path, plan, steps=1)
        return sum(isinstance(event, Op) and event.name.startswith("aten.mm.") for event in trace.events)

    assert products("async", "nccl") < products("async", "gloo")


@pytest.mark.parametrize(
    ("family", "params", "bins", "expected"),
    [
        ("llama", SHARDED, 2, 2),
        ("llama", {"*": "replicate"}, 3, 3),
        ("gemma2", SHARDED, 1, 2),
        ("gemma2", SHARDED, 4, 4),
        ("gpt2", SHARDED, 2, 2),
    ],
)
def test_bins_come_round_after_the_blocks_that_fill_them(family, params, bins, expected):
    """Of gemma2's blocks two in turn are unlike, so what repeats is whole pairs."""
    path, plan = case(family, 12, params=params, bins=bins)
    config = load_config(path)
    unit = [0, 1] if family == "gemma2" else [0]
    assert bucket_period(family_of(config), config, plan, 0, unit) == expected
    assert bucket_period(family_of(config), config, plan.evolve(bucket=plan.bucket + 512), 0, unit) is None


def test_a_cap_whose_bins_do_not_come_round_together_is_refused():
    """Stored whole, biases and norms of gpt2 are summed over different ranks: they fill bins of their own."""
    path, plan = case("gpt2", 6, params={"*": "replicate"})
    with pytest.raises(InputError, match="bucket: found bins that come round after None blocks"):
        cap_of(load_config(path), plan, 2)
