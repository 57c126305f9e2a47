"""JSON-lines metrics: whole lines at any time, appended."""

from __future__ import annotations

from pathlib import Path

from shardwright.train.metrics import MetricsWriter, read_metrics


def test_lines_are_there_at_once_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(step=1, loss=8.25, tokens_per_second=1000.0, seconds=0.5, peak_bytes=3 * 2**29)
        assert read_metrics(path) == [
            {"step": 1, "loss": 8.25, "tokens_per_second": 1000.0, "seconds": 0.5, "memory/peak(GiB)": 1.5}
        ]
    with MetricsWriter(path) as writer:
        writer.write(step=2, loss=8.0, tokens_per_second=1000.0, seconds=0.5)
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 2]
    assert "memory/peak(GiB)" not in lines[1]
