"""A run that continues from its last whole checkpoint (ACCEPTANCE F4)."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwright.checkpoint.tensor_file import TensorWriter
from shardwright.train.data import standard_library_text
from shardwright.train.loop import METRICS
from shardwright.train.metrics import MetricsWriter, forget_metrics_after, read_metrics
from shardwright.train.sources import documents
from support import tiny
from test_pretrained import hugging_face
from test_train import VOCAB, prepare, trained


def die_in_the_save_of_step_8(rank: int) -> None:
    make = TensorWriter.__init__

    def init(self: TensorWriter, path: Path, *rest: Any) -> None:
        if rank == 1 and "step-00000008" in str(path):
            os._exit(1)
        make(self, path, *rest)

    TensorWriter.__init__ = init  # type: ignore[method-assign]


def curve(place: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line.get("evaluation/loss")) for line in read_metrics(place / "out" / METRICS)]


def test_f4_a_run_continues_from_its_last_whole_checkpoint_to_the_same_curve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = list(documents("text", standard_library_text(max_bytes=60_000, package="encodings")))
    start = hugging_face(tiny.config_path(vocab_size=VOCAB))
    nn.init.zeros_(start.lm_head.weight)
    start.save_pretrained(tmp_path / "start")
    changes = {
        "steps": 10,
        "checkpoint": {"directory": "saved", "every": 4, "keep": 2},
        "weights": str(tmp_path / "start"),
        "export": "trained",
        "metrics": ["jsonl"],
    }
    runs = {}
    for name in ("through", "killed", "alone"):
        (tmp_path / name).mkdir()
        runs[name] = prepare(tmp_path / name, texts, 1 if name == "alone" else 2, changes)
    assert trained(runs["through"], 2) == [0, 0]
    assert sorted(os.listdir(tmp_path / "through" / "saved")) == ["step-00000008", "step-00000010"]
    expected = curve(tmp_path / "through")
    assert [step for step, *_ in expected] == list(range(1, 11)) and expected[-1][2] is not None
    assert expected[0][1] == pytest.approx(math.log(VOCAB), rel=1e-6)  # it started from those weights

    assert trained(runs["killed"], 2, die_in_the_save_of_step_8)[1] == 1
    assert len(curve(tmp_path / "killed")) == 8 and not (tmp_path / "killed" / "trained").exists()
    capfd.readouterr()
    assert trained(runs["killed"], 2) == [0, 0]
    assert f"continues after step 4 from {tmp_path / 'killed' / 'saved' / 'step-00000004'}" in capfd.readouterr().out
    assert curve(tmp_path / "killed") == expected
    exports = [tmp_path / name / "trained" / "model.safetensors" for name in ("through", "killed")]
    assert exports[0].read_bytes() == exports[1].read_bytes()

    shutil.copytree(tmp_path / "through" / "saved" / "step-00000008", tmp_path / "alone" / "saved" / "step-00000008")
    assert trained(runs["alone"], 1) == [0]  # another number of ranks
    assert [step for step, *_ in curve(tmp_path / "alone")] == [9, 10]
    for one, two in zip(curve(tmp_path / "alone"), expected[8:], strict=True):
        assert one[1] == pytest.approx(two[1], rel=1e-6)

    # The same directory with other data is another run.
    (tmp_path / "alone" / "more.jsonl").write_text('{"body": "more"}\n')
    shutil.rmtree(tmp_path / "alone" / "trained")
    assert trained(runs["alone"], 1) == [2]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "step-00000010: tokens: found " in line and "; allowed: " in line


def test_metrics_of_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    forget_metrics_after(path, 3)
    assert not path.exists()
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": step})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')
    forget_metrics_after(path, 3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
