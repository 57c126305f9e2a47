"""``plan --fallback``: the best data-parallel plan of a model without a rule table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.spec.plan import Plan
from support import tiny
from support.planned import Here, cluster
from test_cli import refused, run

OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0,
}  # fmt: skip
ASK = ("--global-batch", "4", "--sequence", "16", "--dtype", "fp32", "--backend", "gloo", "--fallback")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster file of two devices; ways are rehearsed in this process."""
    monkeypatch.setattr("shardwright.search.unsplit.rehearsing", lambda workers: Here())
    cluster().model_copy(update={"hosts": 1}).save(tmp_path / "cluster.yaml")
    return tmp_path / "cluster.yaml"


def planned(two: Path, *more: str) -> tuple[Plan, dict[str, Any]]:
    place = two.parent
    words = ("--cluster", two, *ASK, *more, "-o", place / "plan.yaml", "--json", place / "plan.json")
    status, told, _ = run("plan", tiny.write_config(OPT), *words)
    assert status == 0 and told.startswith("plan        data=2, ")
    return Plan.load(place / "plan.yaml"), json.loads((place / "plan.json").read_text())


def test_the_fastest_way_that_fits_is_the_plan_and_its_rehearsal_what_it_predicts(two: Path) -> None:
    plan, figures = planned(two)
    assert plan.fallback and plan.mesh == {"data": 2} and (plan.micro_batch, plan.accumulation) == (4, 1)
    trace = sw.rehearse(plan.config_path, plan)
    assert plan.predicted is not None and plan.predicted.peak == trace.phase_peaks
    assert figures["peak"] == trace.peak_bytes and figures["not_applied"] == []
    options = figures["candidates"]
    assert (
        options[0]["why_not"] == "this is the plan" and options[0]["seconds"] == plan.objective == plan.predicted.time
    )
    assert [option["seconds"] for option in options] == sorted(option["seconds"] for option in options)
    assert {option["way"] for option in options} == {
        f"{level}{recomputed}, 1 micro-batch"
        for level in ("replicate", "optimizer", "gradients", "parameters", "parameters, kept")
        for recomputed in ("", ", blocks recomputed")
    }


def test_a_budget_is_kept_or_the_least_that_fits_is_named(two: Path) -> None:
    _, whole = planned(two, "--level", "replicate")
    peaks = {option["way"]: option["peak"] for option in whole["candidates"]}
    budget = peaks["replicate, blocks recomputed, 1 micro-batch"]
    assert budget < peaks["replicate, 1 micro-batch"]
    plan, figures = planned(two, "--level", "replicate", "--memory", str(budget))
    assert plan.recompute == {"*": "block"} and figures["peak"] == budget
    words = ("plan", tiny.write_config(OPT), "--cluster", two, *ASK, "--level", "replicate")
    line = refused(*words, "--memory", str(min(peaks.values()) // 4), status=3)
    assert line.startswith("error: memory: found ") and " at least, with replicate" in line and len(line) <= 300


def test_what_it_does_not_do_is_refused(two: Path) -> None:
    words = ("plan", tiny.write_config(OPT), "--cluster", two, *ASK)
    for option in ("--min-devices", "--max-sequence", "--max-micro-batch"):
        assert f"error: {option}: found it beside --fallback; allowed: " in refused(*words, option)
    assert "--svg: found it beside --fallback" in refused(*words, "--svg", two.parent / "curve.svg")
    assert "batch: found 3 sequences on 2 devices; allowed: a multiple of 2" in refused(*words, "--global-batch", "3")
    assert "sequence: found 64; allowed: at most 32, the positions" in refused(*words, "--sequence", "64")
    without = [word for word in words if word != "--fallback"]
    assert "model_type: found 'opt'; allowed: " in refused(*without)
