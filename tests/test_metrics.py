"""Metrics: whole JSON lines at any time, appended; the same names and values in TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwright.errors import InputError
from shardwright.train.loop import EVENTS, METRICS, WRITERS
from shardwright.train.metrics import MetricsWriter, read_metrics, step_metrics
from shardwright.train.run_file import Run
from shardwright.train.tensorboard import TensorBoardWriter

FIRST = step_metrics(loss=8.25, tokens_per_second=1000.0, seconds=0.5, peak_bytes=3 * 2**29)
SECOND = step_metrics(loss=8.0, tokens_per_second=1000.0, seconds=0.5, evaluation_loss=8.5)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Name → (step, value) of everything in the event files of a directory."""
    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_names() -> None:
    assert FIRST == {"loss": 8.25, "tokens_per_second": 1000.0, "seconds": 0.5, "memory/peak(GiB)": 1.5}
    assert SECOND == {"loss": 8.0, "tokens_per_second": 1000.0, "seconds": 0.5, "evaluation/loss": 8.5}


def test_lines_are_there_at_once_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, FIRST)
        assert read_metrics(path) == [{"step": 1, **FIRST}]
    with MetricsWriter(path) as writer:
        writer.write(2, SECOND)
    assert read_metrics(path) == [{"step": 1, **FIRST}, {"step": 2, **SECOND}]


def test_scalars_are_there_at_once_under_the_same_names(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path / "new") as writer:
        writer.write(1, FIRST)
        assert scalars(tmp_path / "new") == {name: [(1, value)] for name, value in FIRST.items()}
        writer.write(2, SECOND)
    found = scalars(tmp_path / "new")
    assert found["loss"] == [(1, 8.25), (2, 8.0)]
    assert found["memory/peak(GiB)"] == [(1, 1.5)] and found["evaluation/loss"] == [(2, 8.5)]


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # import finds no such package
    with pytest.raises(InputError, match=r"^metrics: found .*; allowed: .*pip install 'shardwright\[tensorboard\]'$"):
        TensorBoardWriter(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_every_word_of_a_run_file_has_a_writer(tmp_path: Path) -> None:
    assert Run.model_json_schema()["properties"]["metrics"]["items"]["enum"] == list(WRITERS)
    for word in WRITERS:
        with WRITERS[word](tmp_path) as writer:
            writer.write(1, FIRST)
    assert read_metrics(tmp_path / METRICS)[0]["loss"] == scalars(tmp_path / EVENTS)["loss"][0][1] == 8.25
