"""What the demo trains on: source code of the standard library, a tokenizer trained on it, and the run file."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwright.files.plain_yaml import write_yaml
from shardwright.train.data import standard_library, standard_library_text, train_tokenizer
from shardwright.train.sources import documents

PACKAGE = "encodings"
"""What is read of the standard library: source that repeats much, so that a short run has something to learn."""

MOST_BYTES = 3 * 2**20
"""The most that is read of it."""

LEARNING_RATE = 1e-3

HEADER = "shardwright run: the demo's training. Every path is relative to this file."


def write_text_and_tokenizer(work: Path, vocab_size: int) -> None:
    """Copies the text that the run reads into ``work/text`` and trains ``work/tokenizer.json`` on it."""
    copies: list[Path] = []
    for source in standard_library_text(max_bytes=MOST_BYTES, package=PACKAGE):
        copy = work / "text" / source.relative_to(standard_library()).with_suffix(".txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        copies.append(copy)
    train_tokenizer(documents("text", copies), vocab_size, work / "tokenizer.json")


def write_run(work: Path, steps: int) -> Path:
    """``work/run.yaml``, which trains ``work/plan.yaml`` on the text and records the first steps."""
    run = {
        "version": 1,
        "plan": "plan.yaml",
        "data": {"text": ["text/**/*.txt"], "tokenizer": "tokenizer.json"},
        "steps": steps,
        "learning_rate": LEARNING_RATE,
        "output": ".",
        "record": True,
        "cluster": "cluster.yaml",
    }
    path = work / "run.yaml"
    write_yaml(path, run, HEADER)
    return path
