"""Classes of equal ranks, the certificate of a plan, and collectives that do not agree (ACCEPTANCE D8, E2)."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from shardwright.certificate import certify as planner_certify
from shardwright.certificate.agreement import ByAxes, agree_by_class, by_axes
from shardwright.certificate.certify import (
    Uncertified,
    certify,
)
from shardwright.comm.divergence import DivergenceError
from shardwright.overlap import blocking
from shardwright.simulate.rank_classes import RankClass, rank_classes
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec.plan import Plan
from shardwright.trace import Collective, Trace
from support import tiny

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61,
    "num_hidden_layers": 1,
}


def plan_of(axes: dict[str, int], layout: str, **settings) -> Plan:
    return tiny.plan_of(axes, layout, tiny.config_path(**SIZES), **{"micro_batch": 4, "sequence": 8, **settings})


EVEN = {"vocab_size": 64, "intermediate_size": 64}
UNEVEN = {
    "features": ({"data": 2, "tensor": 4}, "sequence-parallel", {}),
    "storage": ({"data": 5, "tensor": 1}, "replicate", {"params": {"*": "parameters"}, "micro_batch": 5}),
    "sequences": ({"data": 2, "tensor": 2}, "tensor-all-reduce", {"micro_batch": 5, "sequence": 7}),
    "tokens": ({"data": 1, "tensor": 4}, "sequence-parallel-ring", {"sequence": 7, "micro_batch": 1}),
    "hybrid": ({"a": 2, "data": 3, "tensor": 2}, "sequence-parallel",
               {"micro_batch": 3, "params": {"*": "parameters"}}),
}  # fmt: skip


def figures(trace: Trace):
    return trace.peaks, trace.saved, trace.sent_bytes, trace.arena


@pytest.mark.parametrize("name", UNEVEN)
def test_one_rank_speaks_for_its_class(name):
    axes, layout, settings = UNEVEN[name]
    plan = plan_of(axes, layout, backend="nccl" if name == "hybrid" else "gloo", **settings)
    classes = rank_classes(plan.config_path, plan)
    assert sorted(rank for each in classes for rank in each.ranks) == list(range(plan.world_size))
    assert len(classes) > 1
    for each in classes:
        expected = figures(rehearse(plan.config_path, plan, each.representative, steps=1))
        for rank in each.ranks[1:3]:
            assert figures(rehearse(plan.config_path, plan, rank, steps=1)) == expected, (rank, each)


def test_where_all_divides_ranks_are_one_class():
    path = tiny.config_path(**{**SIZES, **EVEN})
    plan = tiny.plan_of(
        {"data": 16, "tensor": 2}, "sequence-parallel", path, micro_batch=16, params={"*": "parameters"}
    )
    assert rank_classes(path, plan) == (RankClass(tuple(range(32))),)


@functools.cache
def certified():
    plan = plan_of({"data": 2, "tensor": 4}, "sequence-parallel")
    return plan, certify(plan.config_path, plan)


def test_a_certificate_speaks_for_the_fullest_rank():
    plan, certificate = certified()
    traces = [rehearse(plan.config_path, plan, rank) for rank in range(plan.world_size)]
    assert certificate.peak_bytes == max(trace.peak_bytes for trace in traces)
    assert certificate.saved == max(trace.saved_bytes for trace in traces)
    assert certificate.volume == max(trace.sent_bytes for trace in traces)
    for phase, peak in certificate.peak.items():
        assert peak == max(trace.phase_peaks[phase] for trace in traces)
    for dtype, sizes in certificate.arena.items():
        assert sizes == [max(each) for each in zip(*(padded(t.arena[dtype], len(sizes)) for t in traces), strict=True)]
    agree(dict(enumerate(traces)), plan.mesh)


def agree(traces: dict[int, Trace], mesh: dict[str, int]) -> None:
    """Each rank is a class of its own."""
    agree_by_class(said(traces, mesh), [RankClass((rank,)) for rank in traces], mesh)


def padded(sizes: list[int], length: int) -> list[int]:
    return sizes + [0] * (length - len(sizes))


def test_a_plan_keeps_what_is_certain(tmp_path):
    plan, certificate = certified()
    certificate.written(plan).save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.predicted is not None
    assert loaded.predicted.peak == certificate.peak
    assert (loaded.predicted.saved, loaded.predicted.volume) == (certificate.saved, certificate.volume)
    assert loaded.arena == certificate.arena
    told = loaded.predicted.rank_classes
    assert sum(each["ranks"] for each in told.values()) == 8
    assert max(each["peak"]["forward"] for each in told.values()) == certificate.peak["forward"]


@pytest.mark.parametrize("name", ["peak", "saved", "volume"])
def test_a_wrong_prediction_is_no_certificate(name, monkeypatch):
    plan, certificate = certified()
    rehearsed = functools.cache(lambda rank: rehearse(plan.config_path, plan, rank))
    monkeypatch.setattr(planner_certify, "rehearse_stretched", lambda _, __, rank: rehearsed(rank))
    right = {"peak": certificate.peak_bytes, "saved": certificate.saved, "volume": certificate.volume}
    assert certify(plan.config_path, plan, right).classes == certificate.classes
    with pytest.raises(Uncertified, match=rf"{name}: {right[name] - 1:,} bytes were predicted, {right[name]:,} reh"):
        certify(plan.config_path, plan, right | {name: right[name] - 1})


def test_d8_the_first_collective_that_a_rank_skips_is_named(monkeypatch):
    plan = plan_of({"data": 2, "tensor": 2}, "tensor-all-reduce")
    traces = {rank: rehearse(plan.config_path, plan, rank, steps=1) for rank in range(4)}
    agree(traces, plan.mesh)
    site = "model.layers.0.mlp.gate_up"
    launch = blocking.all_reduce
    monkeypatch.setattr(blocking, "all_reduce", lambda x, g, module, wide: module == site or launch(x, g, module, wide))
    traces[3] = rehearse(plan.config_path, plan, 3, steps=1)
    over = [event for event in traces[2].collectives if event.axes == ("tensor",)]
    index = next(i for i, event in enumerate(over) if event.module == site and event.phase == "backward")
    bytes_of_dx = plan.micro_batch // 2 * plan.sequence * SIZES["hidden_size"] * 4
    told = (
        f"collective {index} of the group of ranks 2, 3: rank 2 issues all_reduce over tensor of {bytes_of_dx:,} bytes"
    )
    with pytest.raises(
        DivergenceError, match=f"^{re.escape(told)} \\({site}, step 1, backward\\), rank 3 issues all_reduce"
    ):
        agree(traces, plan.mesh)


def collective(size: int, kind: str = "all_gather", ranks: tuple[int, ...] = (0, 1), axes=("data",)) -> Collective:
    return Collective(1, "forward", "mlp", kind, axes, ranks, size, size // 2)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([collective(8), collective(4)], "collective 1 of the group of ranks 0, 1: .*6 bytes.*4 bytes"),
        ([collective(8)], "collective 1 .* rank 1 issues none"),
        ([collective(8), collective(6), collective(2)], "collective 2 .* rank 0 issues none"),
        ([collective(8), collective(6, "reduce_scatter")], "collective 1 .* all_gather .* reduce_scatter"),
        ([], "collective 0 .* rank 1 issues none"),
    ],
)
def test_the_first_difference_is_told(theirs, message):
    traces = {0: Trace([collective(8), collective(6)]), 1: Trace([*theirs])}
    with pytest.raises(DivergenceError, match=message):
        agree(traces, {"data": 2})


def said(traces: dict[int, Trace], mesh: dict[str, int]) -> dict[int, ByAxes]:
    return {rank: by_axes(trace, mesh) for rank, trace in traces.items()}


def test_groups_are_told_apart():
    far = [replace(event, ranks=(2, 3)) for event in (collective(4), collective(2))]
    traces = {0: Trace([collective(8)]), 1: Trace([collective(8)]), 2: Trace([*far]), 3: Trace([*far])}
    agree(traces, {"replica": 2, "data": 2})


def test_classes_that_never_meet_need_not_agree():
    traces = {0: Trace([collective(8)]), 2: Trace([replace(collective(4), ranks=(2, 3))])}
    classes = [RankClass((0, 1)), RankClass((2, 3))]
    apart, together = {"replica": 2, "data": 2}, {"data": 2, "replica": 2}
    agree_by_class(said(traces, apart), classes, apart)
    with pytest.raises(DivergenceError):
        agree_by_class(said(traces, together), classes, together)
