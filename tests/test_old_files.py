"""Plan, cluster and run files of version 1, and options of then: read, and told of in one line."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan
from shardwright.train.run_file import Run
from test_cli import refused, run

OLD = Path(__file__).parent / "data" / "version1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The files of then, and what a run file names beside them."""
    place = tmp_path / "old"
    shutil.copytree(OLD, place)
    for name in ("text.txt", "tokenizer.json"):
        (place / name).touch()
    return place


def changed(path: Path, before: str, after: str) -> Path:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return path


def test_an_old_plan_loads_and_one_line_says_what_to_write(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan.load(old / "plan.yaml")
    assert (plan.version, plan.micro_batch, plan.accumulation, plan.global_batch) == (2, 8, 3, 24)
    told = f"{old / 'plan.yaml'}: found version 1, which is read still; write version: 2, micro_batch for batch"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.WARNING, told)]
    caplog.clear()
    plan.save(old / "new.yaml")
    assert Plan.load(old / "new.yaml") == plan and not caplog.records
    assert "\nmicro_batch: 8\n" in (old / "new.yaml").read_text()


def test_an_old_cluster_loads_and_one_line_says_what_to_write(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster.load(old / "cluster.yaml")
    assert cluster.links is not None and [each.contention for each in cluster.links.measured] == [1.0, 1.25]
    assert [record.getMessage().partition("; ")[2] for record in caplog.records] == [
        "write version: 2, contention for beside"
    ]
    caplog.clear()
    cluster.save(old / "new.yaml")
    assert Cluster.load(old / "new.yaml") == cluster and not caplog.records


def test_a_run_file_is_of_version_1_still(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Run.load(old / "run.yaml").plan_path == old / "plan.yaml" and not caplog.records


def test_both_words_and_the_old_one_in_a_new_file_are_refused(old: Path) -> None:
    plan, cluster = old / "plan.yaml", old / "cluster.yaml"
    cases = [
        (
            changed(plan, "batch: 8", "batch: 8\nmicro_batch: 8"),
            "batch (line 9): found it beside micro_batch; allowed: ",
        ),
        (changed(plan, "version: 1", "version: 2"), "batch (line 9): found it beside micro_batch; allowed: "),
    ]
    for path, line in cases:
        with pytest.raises(InputError, match=re.escape(f"{path}: {line}")):
            Plan.load(path)
    changed(plan, "\nmicro_batch: 8", "")
    with pytest.raises(InputError, match=r"batch \(line 9\): found the word of version 1; allowed: micro_batch$"):
        Plan.load(plan)
    key = "links.measured[1].beside"
    with pytest.raises(InputError, match=re.escape(f"{key} (line 10): found it beside contention; allowed: ")):
        Cluster.load(changed(cluster, "beside: 1.25", "beside: 1.25, contention: 1.25"))
    changed(cluster, "beside: 1.25, contention: 1.25", "beside: 1.25")
    with pytest.raises(InputError, match=re.escape(f"{key} (line 10): found the word of version 1; allowed: cont")):
        Cluster.load(changed(cluster, "version: 1", "version: 2"))


def test_a_fault_in_an_old_file_names_the_new_word_and_its_line(old: Path) -> None:
    with pytest.raises(InputError, match=r"micro_batch \(line 9\): found 0; allowed: a whole number of at least 1$"):
        Plan.load(changed(old / "plan.yaml", "batch: 8", "batch: 0"))
    with pytest.raises(InputError, match=re.escape("links.measured[1].contention (line 10): found 0.5; allowed: ")):
        Cluster.load(changed(old / "cluster.yaml", "beside: 1.25", "beside: 0.5"))


def test_old_options_are_read_and_one_line_says_what_to_write(old: Path) -> None:
    config = old / "config.json"
    words = ("rehearse", config, "--layout", "nope", "--mesh", "data=1", "--sequence", "8")
    code, _, error = run(*words, "--batch=1")
    assert code == 2 and error.count("\n") == 2
    assert error.startswith("warning: --batch is called --micro-batch now; write --micro-batch\nerror: plan: layouts")
    assert "--batch: found it beside --micro-batch" in refused(*words, "--batch", "1", "--micro-batch", "1")
    code, _, error = run("plan", config, "--devices", "1xH100-80GB", "--batch", "-1", "--max-batch")
    assert code == 2 and error.splitlines()[:2] == [
        "warning: --batch is called --global-batch now; write --global-batch",
        "warning: --max-batch is called --max-micro-batch now; write --max-micro-batch",
    ]
    assert error.splitlines()[2].startswith("error: global_batch: found -1; allowed: at least 1")
    assert not re.search(r"--(max-)?batch\b", run("plan", "--help")[1] + run("rehearse", "--help")[1])
