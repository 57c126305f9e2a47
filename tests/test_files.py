"""Plan, cluster and run files: what is right survives the way to disk and back."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.files.plain_yaml import write_yaml
from shardwright.files.sizes import format_bytes, parse_bytes
from shardwright.spec.cluster import Cluster
from shardwright.spec.dtypes import DTYPES
from shardwright.spec.layout import OPERAND_WORDS, GridLayout
from shardwright.spec.plan import Plan
from shardwright.spec.plan_fields import Predicted
from shardwright.spec.site import Linear, Site
from shardwright.train.run_file import Run
from support.malformed import CONFIG, RUN, TEXT
from test_malformed import fault


def test_plan_fields(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    plan = Plan.load(Path(place.name) / "plan.yaml")
    assert plan.config_path == place / "config.json"
    assert plan.mesh == {"data": 2, "tensor": 4} and list(plan.mesh) == ["data", "tensor"]
    assert plan.world_size == 8 and plan.data_axes == ("data",)
    assert plan.arena == {"float32": [4096, 1024]}
    assert plan.predicted == Predicted(peak={"forward": 10, "backward": 20}, saved=5, volume=7, time=0.001)
    assert plan.layouts == {
        "model.layers.*.qkv": GridLayout(m=("data",), n=("tensor",), w={"data": "sharded"}),
        "*": "sequence-parallel",
    }


def test_a_plan_whose_config_is_elsewhere_still_loads(place: Path) -> None:
    (place / "config.json").unlink()
    assert Plan.load(place / "plan.yaml").config_path == place / "config.json"


def test_first_pattern_wins_and_presets_see_the_site(place: Path) -> None:
    plan = Plan.load(place / "plan.yaml")
    column = Site("model.layers.0.qkv", "column", 8, 8, (Linear("q", 8),))
    row = Site("model.layers.0.down", "row", 8, 8, (Linear("down", 8),))
    assert plan.layout_for(column) == GridLayout(m=("data",), n=("tensor",), w={"data": "sharded"})
    assert plan.layout_for(row) == GridLayout(m=("data",), k=("tensor",), y="sharded")
    turned = plan.evolve(layouts=dict(reversed(plan.layouts.items())))
    assert turned.layout_for(column) == GridLayout(m=("data",), n=("tensor",), x="sharded")
    assert turned != plan
    with pytest.raises(InputError, match=r"no pattern for the site model\.layers\.0\.down"):
        plan.evolve(layouts={"*.qkv": "replicate"}).layout_for(row)


def test_world_size(place: Path) -> None:
    plan = Plan.load(place / "plan.yaml")
    plan.check_world_size(8)
    with pytest.raises(InputError, match=r"^mesh: data=2,tensor=4 needs 8 ranks, found 4; allowed: "):
        plan.check_world_size(4)


def test_in_memory_faults_are_one_line_too(place: Path) -> None:
    plan = Plan.load(place / "plan.yaml")
    changes: dict[str, Mapping[str, Any]] = {
        "plan: micro_batch: found 'x'; allowed: a whole": {"micro_batch": "x"},
        "plan: micro_bach: found an unknown key (did you mean micro_batch?)": {"micro_bach": 3},
        "plan: layouts.*.m: found the axis 'z'": {"layouts": {"*": GridLayout(m=("z",))}},
        "plan: mesh: found an empty mapping": {"mesh": {}},
    }
    for start, change in changes.items():
        with pytest.raises(InputError) as caught:
            plan.evolve(**change)
        assert str(caught.value).startswith(start)
    with pytest.raises(InputError, match=r"^config: found no file"):
        Plan.for_config(place / "none.json", mesh={"data": 1}, layout="replicate", micro_batch=1, sequence=1)


def test_evolve_leaves_the_original(place: Path) -> None:
    plan = Plan.load(place / "plan.yaml")
    other = plan.evolve(micro_batch=16, predicted=None)
    assert (plan.micro_batch, other.micro_batch, other.predicted) == (8, 16, None)
    assert other.config_path == plan.config_path and other != plan
    with pytest.raises(Exception, match="frozen"):
        plan.micro_batch = 3


AXES = {"a": 2, "b": 1, "c": 3, "d": 2}


@st.composite
def layouts(draw: st.DrawFn) -> GridLayout:
    roles: dict[str, list[str]] = {"m": [], "n": [], "k": [], "idle": []}
    for axis in draw(st.permutations(list(AXES))):
        roles[draw(st.sampled_from(list(roles)))].append(axis)
    words: dict[str, Any] = {}
    for operand, role in (("x", "n"), ("w", "m"), ("y", "k")):
        word = st.sampled_from(OPERAND_WORDS[operand])
        some = st.dictionaries(st.sampled_from(roles[role]), word) if roles[role] else st.just({})
        words[operand] = draw(word | some)
    return GridLayout(
        m=tuple(roles["m"]),
        n=tuple(roles["n"]),
        k=tuple(roles["k"]),
        **words,
        save_x=draw(st.sampled_from(["shard", "gathered"])),
        save_w=draw(st.sampled_from(["shard", "gathered"])),
        overlap=draw(st.sampled_from(["blocking", "async", "ring"])),
        chunks=draw(st.integers(0, 4)),
        reduce_dtype=draw(st.sampled_from(["same", "float32"])),
    )


@settings(deadline=None)  # a busy disk is no fault of the plan
@given(
    chosen=st.dictionaries(st.text(min_size=1, max_size=12), layouts(), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    time=st.none() | st.floats(0, 1e6),
    arena=st.none() | st.dictionaries(st.sampled_from(list(DTYPES)), st.lists(st.integers(1, 2**40)), max_size=2),
)
def test_plan_comes_back_as_it_was_saved(
    chosen: dict[str, GridLayout],
    seed: int,
    time: float | None,
    arena: dict[str, list[int]] | None,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text(CONFIG)
        plan = Plan.for_config(
            place / "model",
            mesh=AXES,
            layout=GridLayout(),
            micro_batch=4,
            sequence=16,
            layouts=chosen,
            seed=seed,
            arena=arena and {dtype: sorted(sizes, reverse=True) for dtype, sizes in arena.items()},
            predicted=Predicted(peak={"step": 3}, saved=1, volume=0, time=time),
        )
        plan.save(place / "plan.yaml")
        again = Plan.load(place / "plan.yaml")
        assert again == plan
        assert list(again.layouts) == list(chosen) and again.layouts == chosen
        assert again.model.config == "model/config.json" and plan.model.config == "config.json"


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "0x10",
        "no",
        "on",
        "1_000",
        "1:30",
        "2024-01-01",
        "~",
        ".5",
        "010",
        "null",
        "=",
        "y",
        "a\x85b",
        "a\u2028",
        "ö\n ",
    ],
)
def test_words_that_look_like_something_else_stay_words(place: Path, text: str) -> None:
    path = place / "words.yaml"
    plan = Plan.load(place / "plan.yaml").evolve(layouts={text: "replicate"})
    plan.save(path)
    assert Plan.load(path) == plan
    assert list(yaml.safe_load(path.read_text(encoding="utf-8"))["layouts"]) == [text]


def test_saved_plan_is_readable(place: Path) -> None:
    Plan.load(place / "plan.yaml").save(place / "sub.yaml")
    lines = (place / "sub.yaml").read_text().splitlines()
    assert lines[0].startswith("# shardwright plan: ")
    for line in ("mesh: {data: 2, tensor: 4}", "backend: gloo", "dtype: float32", "seed: 0", "recompute: {}"):
        assert line in lines
    assert not any(line.startswith(("objective", "bound", "gap")) for line in lines)


def test_cluster_fields(place: Path) -> None:
    cluster = Cluster.load(place / "cluster.yaml")
    assert (cluster.devices, cluster.memory_bytes) == (16, 80 * 2**30)
    assert cluster.device.flops == {"bfloat16": 9.9e14}
    assert cluster.links is not None and cluster.links.within_host.latency == 1e-6
    (place / "cluster.yaml").write_text(
        "version: 2\nhosts: 1\ndevices_per_host: 2\ndevice: {name: cpu, memory: 1024}\n"
    )
    assert Cluster.load(place / "cluster.yaml").memory_bytes == 1024


def test_run_fields(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    run = Run.load(os.path.join(place.name, "run.yaml"))
    assert run.plan_path == place / "plan.yaml" and run.tokenizer_path == place / "tokenizer.json"
    assert run.data.kind == "text" and run.metrics == ["jsonl", "tensorboard"]
    assert run.source_paths(run.data) == (place / "text" / "a.txt", place / "text" / "b.txt")
    assert run.evaluation is not None and run.source_paths(run.evaluation) == (place / "held.jsonl",)
    assert (run.evaluation.kind, run.evaluation.field) == ("jsonl", "body")
    assert (run.evaluation.every, run.evaluation.batches) == (10, 2)
    assert run.output_dir == place / "out" and run.cluster_path == place / "cluster.yaml"
    assert run.checkpoint is not None and (run.checkpoint.every, run.checkpoint.keep) == (20, 3)
    assert run.checkpoint_dir == place / "saved"
    assert run.weights_dir == place / "pretrained" and run.export_dir == place / "trained"
    assert (run.learning_rate, run.betas, run.weight_decay, run.record) == (1e-3, (0.9, 0.95), 0.0, True)


def test_a_text_file_named_twice_is_read_once(place: Path) -> None:
    (place / "run.yaml").write_text(RUN.replace("['text/*.txt']", "[text/b.txt, 'text/**', text/b.txt]"))
    run = Run.load(place / "run.yaml")
    assert [path.name for path in run.source_paths(run.data)] == ["b.txt", "a.txt"]


def test_a_run_file_of_an_earlier_version_still_loads(place: Path) -> None:
    (place / "run.yaml").write_text(RUN[: RUN.index("metrics")])
    run = Run.load(place / "run.yaml")
    assert (run.checkpoint_dir, run.weights_dir, run.export_dir) == (None, None, None)
    assert (run.metrics, run.evaluation, run.data.kind, run.data.field) == (["jsonl"], None, "text", "text")


@pytest.mark.parametrize(
    ("package", "old", "new", "line"),
    [
        (
            "tensorboard",
            "",
            "",
            "metrics[1] (line 13): found tensorboard without the package tensorboard; "
            "allowed: tensorboard after pip install 'shardwright[tensorboard]'",
        ),
        (
            "pyarrow",
            TEXT,
            "  parquet: [a.parquet]\n",
            "data.parquet (line 4): found parquet without the package pyarrow; "
            "allowed: parquet after pip install 'shardwright[parquet]'",
        ),
    ],
)
def test_a_package_that_is_not_installed_is_one_line(
    package: str, old: str, new: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "a.parquet").write_bytes(b"")
    (place / "run.yaml").write_text(RUN.replace(old, new, 1))
    monkeypatch.setitem(sys.modules, package, None)  # import finds no such package
    assert fault(Run, place / "run.yaml") == f"{place / 'run.yaml'}: {line}"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match="found permission denied; allowed: a path in a writable directory"):
        write_yaml(path, {"a": 1}, "comment")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"] and path.read_text() == "old"


# Sizes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("72GiB", 72 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("512", 512),
        ("512B", 512),
        (7, 7),
        ("2TiB", 2**41),
        ("0.5KiB", 512),
    ],
)
def test_parse_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["72GB", "72gib", "72G", "-3", "x", "1.5", "1.5B", "1e3", "", "GiB", "1 2GiB", -1, True, None]
)
def test_parse_bytes_refuses(text: Any) -> None:
    with pytest.raises(InputError, match=r"^memory: found .*; allowed: .*GiB") as caught:
        parse_bytes(text, "memory")
    assert len(str(caught.value).splitlines()) == 1
    if isinstance(text, str) and re.fullmatch("72G[Bb]?", text):
        assert "allowed: 72GiB, where 1 GiB = 2^30 bytes" in str(caught.value)


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 512, 1023, 1024, 2**20 - 1, 3 * 2**29, 2**50, -2048)] == [
        "0 B", "512 B", "1023 B", "1.00 KiB", "1.00 MiB", "1.50 GiB", "1024.00 TiB", "-2.00 KiB",
    ]  # fmt: skip


@given(st.integers(0, 2**50))
def test_format_bytes_reads_back(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(0.5, count * 0.005)
