"""The training command on real ranks: documents of every kind in, metrics out, and bad documents in one line."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardwright.comm.launched import REFUSAL_SECONDS
from shardwright.files.plain_yaml import write_yaml
from shardwright.spec.plan import Plan
from shardwright.train import launcher
from shardwright.train.data import load_tokenizer, standard_library_text, train_tokenizer
from shardwright.train.loop import EVENTS, METRICS, train
from shardwright.train.metrics import read_metrics
from shardwright.train.preparation import EVALUATION_TOKENS, TOKENS
from shardwright.train.sources import documents
from support import tiny
from test_checkpoint_faults import forked
from test_cli import cluster_file, refused
from test_cli import run as command_here
from test_metrics import scalars

VOCAB, STEPS = 320, 25


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(documents("text", standard_library_text(max_bytes=60_000, package="encodings")))


def prepare(place: Path, texts: Sequence[str], ranks: int, changes: Mapping[str, Any] | None = None) -> Path:
    """A run file and everything that it names: the texts as JSON lines, and held out what is not in any of them."""
    plan = tiny.plan_of({"data": ranks, "tensor": 1}, "replicate", tiny.config_path(vocab_size=VOCAB), micro_batch=4)
    plan.save(place / "plan.yaml")
    train_tokenizer(texts, VOCAB, place / "tokenizer.json")
    (place / "train.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    held_out = ["".join(random.Random(n).choices("\x00\x01", k=500)) for n in range(3)]
    parquet.write_table(pyarrow.table({"text": held_out}), place / "held.parquet", row_group_size=2)
    run = {
        "version": 1,
        "plan": "plan.yaml",
        "data": {"jsonl": ["*.jsonl"], "field": "body", "tokenizer": "tokenizer.json"},
        "steps": STEPS,
        "learning_rate": 3e-3,
        "output": "out",
        "metrics": ["jsonl", "tensorboard"],
        "evaluation": {"parquet": ["held.parquet"], "every": 10, "batches": 3},
    }
    write_yaml(place / "run.yaml", {**run, **(changes or {})}, "a run")
    return place / "run.yaml"


def launch(run: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "shardwright", "train", str(run), "--ranks", str(ranks)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def trained(run: Path, ranks: int, spoil: Callable[[int], object] = lambda rank: None) -> list[int]:
    """Exit codes of the ranks of a training run, each forked from here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> None:
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in {**launched, "MASTER_PORT": port}.items()})
        spoil(rank)
        train(run)

    return forked(ranks, work)


def test_documents_in_metrics_out_the_same_on_one_rank_and_two(texts: list[str], tmp_path: Path) -> None:
    """Two ranks that the command starts, one without a launcher."""
    curves = []
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        place.mkdir()
        run = prepare(place, texts, ranks, {"record": ranks == 2})
        if ranks == 1:
            assert trained(run, 1) == [0]
        else:
            done = launch(run, 2)
            assert done.returncode == 0, done.stderr
        lines = read_metrics(place / "out" / METRICS)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["step"] for line in lines if "evaluation/loss" in line] == [10, 20]
        found = scalars(place / "out" / EVENTS)
        for name in {name for line in lines for name in line} - {"step"}:
            expected = [(line["step"], line[name]) for line in lines if name in line]
            assert [step for step, _ in found[name]] == [step for step, _ in expected]
            assert [value for _, value in found[name]] == pytest.approx([v for _, v in expected], rel=1e-6)
        assert set(found) == {name for line in lines for name in line} - {"step"}
        assert ("memory/peak(GiB)" in found) == (ranks == 2)  # recorded
        curves.append([[line["loss"] for line in lines], [lines[9]["evaluation/loss"], lines[19]["evaluation/loss"]]])
    for one, two in zip(*curves, strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    losses, held_out = curves[0]
    assert losses[-1] < losses[0] and held_out[-1] > held_out[0]  # what is learnt tells against what is held out


def test_a_bad_document_ends_every_rank_at_once_and_leaves_what_was_there(
    texts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = prepare(tmp_path, texts, 2)
    (tmp_path / "z.jsonl").write_text('{"body": "a"}\n{"body": 3}\n')
    (tmp_path / "out").mkdir()
    for name in (TOKENS, EVALUATION_TOKENS, METRICS):
        (tmp_path / "out" / name).write_text("of an earlier run")
    capfd.readouterr()
    began = time.monotonic()
    assert trained(run, 2) == [2, 2]
    assert time.monotonic() - began < REFUSAL_SECONDS / 2  # no rank waits for another that will never come
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {tmp_path / 'z.jsonl'}: body (line 2): found 3; allowed: text"]
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        (TOKENS, EVALUATION_TOKENS, METRICS), "of an earlier run"
    )


PEAK = {"peak": {"backward": 2**20}, "saved": 0, "volume": 0}


@pytest.mark.parametrize(
    ("devices", "memory", "predicted", "status", "line"),
    [
        (2, "1GiB", PEAK, 2, "mesh: found 1 ranks for the 2 devices of "),
        (1, "1MiB", PEAK, 0, ""),
        (
            1,
            "1048575B",
            PEAK,
            3,
            "does not fit: the plan predicts a peak of 1.00 MiB (1,048,576 bytes), a device holds",
        ),
        (1, "1MiB", None, 3, "does not fit: the peak of rank 0 is "),
    ],
    ids=["devices", "fits", "predicted", "rehearsed"],
)
def test_the_cluster_of_a_run_is_what_it_must_fit(
    devices: int,
    memory: str,
    predicted: dict[str, Any] | None,
    status: int,
    line: str,
    texts: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rehearsed(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """In this process, which has loaded what another would have to."""
        return subprocess.CompletedProcess(words, *command_here(*words[3:]))

    monkeypatch.setattr("shardwright.train.preparation.subprocess.run", rehearsed)
    run = prepare(tmp_path, texts, 1, {"steps": 1, "evaluation": None, "cluster": "cluster.yaml"})
    cluster_file(tmp_path / "cluster.yaml", devices, memory)
    Plan.load(tmp_path / "plan.yaml").evolve(predicted=predicted).save(tmp_path / "plan.yaml")
    assert trained(run, 1) == [status]
    lines = [each for each in capfd.readouterr().err.splitlines() if each.startswith("error: ")]
    assert len(lines) == (status != 0) and all(each.startswith(f"error: {line}") for each in lines)
    assert (tmp_path / "out" / METRICS).exists() == (status == 0)


def test_ranks_that_are_started_here_are_as_many_as_the_plan_says(texts: list[str], tmp_path: Path) -> None:
    run = prepare(tmp_path, texts, 2)
    assert "mesh: data=2,tensor=1 needs 2 ranks, found 3" in refused("train", run, "--ranks", "3")
    assert "--ranks: found 0; allowed: at least 1" in refused("train", run, "--ranks", "0")


def test_the_launcher_exits_as_its_ranks_do() -> None:
    """torch's own makes 1 of every other status."""
    words = [sys.executable, "-m", "shardwright.train.launcher", "2", "schema", "nosuch"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    lines = {line for line in done.stderr.splitlines() if "FutureWarning" not in line}
    assert lines == {"error: schema: found nosuch; allowed: plan, cluster, run"}


@pytest.mark.parametrize(("codes", "status"), [([3, 3], 3), ([-15, 2], 2), ([-9, -15], 1), ([1, -15], 1)])
def test_what_ranks_end_with_becomes_one_exit_status(
    codes: list[int], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(words: Any) -> None:
        failures = {rank: ProcessFailure(rank, 1, code, "nowhere") for rank, code in enumerate(codes)}
        raise ChildFailedError("train", failures)

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert launcher.main(2, ["train", "run.yaml"]) == status
    ended = {-9: "error: rank 0 ended with signal 9\n", 1: "error: rank 0 ended with exit status 1\n"}
    assert capsys.readouterr().err == (ended[codes[0]] if status == 1 else "")


def test_a_run_begins_with_what_is_not_applied_and_what_may_vanish(
    texts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = prepare(tmp_path, texts, 1, {"steps": 1, "evaluation": None, "learning_rate": 1e-4})
    layouts = {"*": {"m": ["data"], "overlap": "async"}}
    plan = Plan.load(tmp_path / "plan.yaml").evolve(layouts=layouts, dtype="bfloat16", master_dtype="bfloat16")
    plan.save(tmp_path / "plan.yaml")
    assert trained(run, 1) == [0]
    told = capfd.readouterr()
    assert "not applied: overlap: async (model.layers.*.self_attn.qkv, " in told.out.partition("step 1/1")[0]
    assert "warning: master_dtype: bfloat16 weights about 1, as of norms, do not take steps below 2^-9" in told.err


def test_a_port_in_use_is_one_line(
    texts: list[str], tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(tmp_path, texts, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert refused("train", run) == f"error: MASTER_PORT: found {port}, which is in use; allowed: a free port\n"
    monkeypatch.setenv("MASTER_PORT", "abc")
    assert "MASTER_PORT: found 127.0.0.1, abc in the environment" in refused("train", run)


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_exported_has_the_tokenizer_of_the_run(beside: bool, texts: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = prepare(tmp_path, texts, 1, {"steps": 1, "evaluation": None, "export": "trained"})
    if beside:
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": "<|endoftext|>",
                    "pad_token": "<|endoftext|>",
                }
            )
        )
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert trained(run, 1) == [0]
    found = AutoTokenizer.from_pretrained(tmp_path / "trained")
    own = load_tokenizer(tmp_path / "tokenizer.json")
    assert len(found) == own.get_vocab_size() == VOCAB
    assert found.encode(texts[0], add_special_tokens=False) == own.encode(texts[0], add_special_tokens=False).ids
    assert found.eos_token == "<|endoftext|>"
    assert (found.pad_token, bool(found.chat_template)) == (("<|endoftext|>", True) if beside else (None, False))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"output": "plan.yaml/out"}, "output: found "),
        ({"data": {"text": ["short.txt"], "tokenizer": "tokenizer.json"}}, "data: found 3 tokens; allowed: more than"),
        ({"evaluation": {"text": ["short.txt"], "every": 1}}, "evaluation: found 3 tokens; allowed: more than the"),
        (
            {"evaluation": {"parquet": ["held.parquet"], "field": "body", "every": 1}},
            "held.parquet: found no column 'body'; allowed: as data field one of text",
        ),
    ],
)
def test_what_only_shows_while_reading_is_refused_before_training(
    changes: dict[str, Any], line: str, texts: list[str], tmp_path: Path, one_rank: None
) -> None:
    (tmp_path / "short.txt").write_text("ab")
    assert line in refused("train", prepare(tmp_path, texts, 1, changes))
    assert not (tmp_path / "out" / METRICS).exists()
