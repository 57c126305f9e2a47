"""``shardwright plan``: what it writes, what it refuses, and its exit status (ACCEPTANCE E1, E3, E8, F6)."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.errors import DoesNotFit
from shardwright.search.plan import problem_of
from shardwright.search.search import search
from shardwright.space import request
from shardwright.spec.plan import Plan
from support import tiny
from support.planned import SIZES, cluster, quick  # noqa: F401 (a fixture)
from test_cli import refused, run

ASK = ("--global-batch", "1", "--sequence", "32", "--dtype", "fp32", "--master-dtype", "fp32", "--backend", "gloo")
KEYS = {
    "plan", "global_batch", "objective", "bound", "gap", "memory", "peak", "composed", "solve_time",
    "candidates", "left", "curve", "knobs", "sites", "not_applied",
}  # fmt: skip


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A cluster file: one host of two devices."""
    path = tmp_path / "cluster.yaml"
    cluster().model_copy(update={"hosts": 1}).save(path)
    return path


@functools.cache
def config() -> Path:
    return tiny.config_path(**{**SIZES, "num_hidden_layers": 1})


def test_it_writes_a_plan_that_loads_and_says_how_sure_it_is(two, tmp_path):
    plan_path, json_path, picture = tmp_path / "plan.yaml", tmp_path / "plan.json", tmp_path / "curve.svg"
    status, told, _ = run(
        "plan", config(), "--cluster", two, *ASK, "-o", plan_path, "--json", json_path, "--svg", picture
    )
    assert status == 0
    assert told.startswith("plan "), "nothing is printed before the answer"
    assert all(word in told for word in ("bound", "gap", "certified", "why not another", "what memory buys"))
    plan = Plan.load(plan_path)
    trace = sw.rehearse(plan.config_path, plan)
    assert plan.predicted is not None
    assert (plan.predicted.peak, plan.predicted.saved) == (trace.phase_peaks, trace.saved_bytes)
    figures = json.loads(json_path.read_text())
    assert set(figures) == KEYS
    assert figures["peak"] == figures["composed"]["peak"] == trace.peak_bytes <= figures["memory"]
    assert (figures["objective"], figures["bound"], figures["gap"]) == (plan.objective, plan.bound, plan.gap)
    assert plan.objective is not None and plan.bound is not None
    assert 0 < plan.bound <= plan.objective
    assert plan.solve_time is not None and figures["solve_time"] == plan.solve_time > 0
    assert figures["candidates"][0]["why_not"] == "this is the plan"
    assert min(point["seconds"] for point in figures["curve"]) <= plan.objective
    assert picture.read_text().startswith("<svg") and picture.read_text().endswith("</svg>\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "curve.svg", "plan.json", "plan.yaml"]


@pytest.mark.usefixtures("quick")
def test_what_was_found_is_written_before_it_is_told(two, tmp_path, monkeypatch):
    """Whoever reads may have closed the pipe by then."""

    def closed(found):
        raise BrokenPipeError

    monkeypatch.setattr("shardwright.report.planning.headline", closed)
    path = tmp_path / "plan.yaml"
    with pytest.raises(BrokenPipeError):
        run("plan", config(), "--cluster", two, *ASK, "--seconds", "1", "-o", path)
    assert Plan.load(path).predicted is not None


@pytest.mark.usefixtures("quick")
def test_what_does_not_fit_is_one_line_with_the_least_that_does(two, tmp_path):
    written = tmp_path / "plan.yaml"
    written.write_text("as it was\n")
    line = refused("plan", config(), "--cluster", two, *ASK, "--memory", "1KiB", "-o", written, status=3)
    assert line.startswith("error: memory: found 1.00 KiB") and "allowed: " in line and " at least" in line
    assert written.read_text() == "as it was\n"


@pytest.mark.usefixtures("quick")
def test_the_fewest_devices_and_the_longest_sequence(two, tmp_path):
    asked = ("plan", config(), "--cluster", two, *ASK, "--memory", "1500000", "--json", tmp_path / "plan.json")
    asked = (*asked, "--seconds", "1")
    assert run(*asked, "--min-devices")[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["plan"]["mesh"] == {"data": 1, "tensor": 1}
    assert run(*asked, "--max-sequence")[0] == 0
    longest = json.loads((tmp_path / "plan.json").read_text())
    length = longest["plan"]["sequence"]
    assert length > 32 and longest["peak"] <= longest["memory"] == 1_500_000
    refused(*asked, "--sequence", str(2 * length), status=3)


@pytest.mark.usefixtures("quick")
def test_the_largest_batch_fits_in_one_micro_batch_and_twice_as_much_does_not(two, tmp_path):
    asked = ("plan", config(), "--cluster", two, *ASK, "--memory", "1500000", "--seconds", "1")
    assert run(*asked, "--max-micro-batch", "--json", tmp_path / "plan.json")[0] == 0
    largest = json.loads((tmp_path / "plan.json").read_text())
    batch = largest["plan"]["micro_batch"]
    assert batch > 1 and largest["plan"]["accumulation"] == 1
    assert largest["peak"] <= largest["memory"] == 1_500_000
    twice = problem_of(request.asked(config(), two, 1_500_000, 2 * batch, 32, "float32", None, "gloo"))
    whole = dataclasses.replace(twice, whole=True)
    with pytest.raises(DoesNotFit):
        search(whole, seconds=1)


def test_bad_input_is_one_line(two, tmp_path):
    machine = ("--devices", "8xH100-80GB")
    assert "--cluster: found both or neither" in refused("plan", config(), "--cluster", two, *machine, *ASK)
    assert "--cluster: found both or neither" in refused("plan", config(), *ASK)
    assert "devices: found '8xH1000'" in refused("plan", config(), "--devices", "8xH1000", *ASK)
    assert "devices: found '12xH100-80GB'" in refused("plan", config(), "--devices", "12xH100-80GB", *ASK)
    assert "batch: found 0; allowed: at least 1" in refused("plan", config(), *machine, "--sequence", "8")
    assert "sequence: found 0; allowed: at least 1" in refused("plan", config(), *machine, "--global-batch", "8")
    assert "batch: found -1" in refused("plan", config(), *machine, "--global-batch", "-1", "--sequence", "8")
    assert "batch: found 3 sequences on 7 devices" in refused(
        "plan", config(), "--devices", "7xH100-80GB", "--global-batch", "3", "--sequence", "8"
    )
    assert "memory" in refused("plan", config(), *machine, *ASK, "--memory", "lots")
    assert "memory" in refused("plan", config(), *machine, *ASK, "--memory", "0GiB")
    assert "error: memory: found 81.00 GiB (86,973,087,744 bytes); allowed: at most the 79.00 GiB" in refused(
        "plan", config(), *machine, *ASK, "--memory", "81GiB"
    )
    assert "dtype" in refused("plan", config(), *machine, "--global-batch", "8", "--sequence", "8", "--dtype", "fp12")
    assert "backend" in refused(
        "plan", config(), *machine, "--global-batch", "8", "--sequence", "8", "--backend", "mpi"
    )
    assert "--min-devices" in refused("plan", config(), *machine, *ASK, "--min-devices", "--max-sequence")
    assert "--max-sequence: found it beside --max-micro-batch" in refused(
        "plan", config(), *machine, *ASK, "--max-micro-batch", "--max-sequence"
    )
    assert "nope.json" in refused("plan", tmp_path / "nope.json", *machine, *ASK)
    assert "nope.yaml" in refused("plan", config(), "--cluster", tmp_path / "nope.yaml", *ASK)
    for option in ("--output", "--json", "--svg"):
        assert option in refused("plan", config(), *machine, *ASK, option, tmp_path / "no" / "file")
