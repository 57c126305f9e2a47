"""Plan, cluster and run files: what is wrong comes out as one line, what is right survives the way to disk and back."""

from __future__ import annotations

import hashlib
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

from shardwright._errors import InputError
from shardwright._files import format_bytes, parse_bytes, write_yaml
from shardwright._plan import DTYPES, Plan, Predicted
from shardwright.cluster import Cluster
from shardwright.layout import OPERAND_WORDS, GridLayout, presets
from shardwright.site import Linear, Site
from shardwright.train.run_file import Run
from test_cli import refused

CONFIG = '{"model_type": "llama"}'
SHA = hashlib.sha256(CONFIG.encode()).hexdigest()

PLAN = f"""\
version: 1
model:
  config: config.json
  sha256: {SHA}
mesh: {{data: 2, tensor: 4}}
backend: gloo
batch: 8
accumulation: 1
sequence: 128
dtype: float32
seed: 0
layouts:
  'model.layers.*.qkv':
    m: [data]
    n: [tensor]
    w: {{data: sharded}}
    overlap: blocking
  '*': sequence-parallel
params: {{'*': replicate}}
recompute: {{}}
arena:
  float32: [4096, 1024]
predicted:
  peak: {{forward: 10, backward: 20}}
  saved: 5
  volume: 7
  time: 1e-3
"""

CLUSTER = """\
version: 1
hosts: 2
devices_per_host: 8
device:
  name: H100
  memory: 80GiB
  flops: {bfloat16: 9.9e14}
links:
  within_host: {latency: 1e-6, bandwidth: 4.5e11}
  between_hosts: {latency: 5e-6, bandwidth: 5e10}
"""

RUN = """\
version: 1
plan: plan.yaml
data:
  text: ['text/*.txt']
  tokenizer: tokenizer.json
steps: 60
learning_rate: 1e-3
weight_decay: 0
betas: [0.9, 0.95]
output: out
record: true
cluster: cluster.yaml
metrics: [jsonl, tensorboard]
evaluation:
  jsonl: [held.jsonl]
  field: body
  every: 10
  batches: 2
checkpoint:
  directory: saved
  every: 20
  keep: 3
weights: pretrained
export: trained
"""

WORDS_X = "sharded, sharded-features, replicated"
LAYOUT_KEYS = "m, n, k, x, w, y, save_x, save_w, overlap, chunks, reduce_dtype"
PRESETS = ", ".join(presets)
COUNT = "a whole number of at least 1"
LEVELS = "replicate, optimizer, gradients, parameters"
STORED = f"one of {LEVELS}, or a mapping with the keys level, axes, keep, reduce_dtype, bucket"
AXES = "the mesh's axes (data, tensor)"
QKV = "layouts.model.layers.*.qkv"

# Old text → new text, then what the line must say: the key, the line of the file, what was found, what is allowed.
# Three dots at the end stand for the rest.
Case = tuple[str, str, str, int | None, str, str]

PLANS: list[Case] = [
    ("version: 1", "version: 2", "version", 1, "2", "1"),
    ("version: 1", "version: '1'", "version", 1, "'1'", "1"),
    ("version: 1", "version: true", "version", 1, "true", "1"),
    ("version: 1", "version: 1.0", "version", 1, "1.0", "1"),
    ("version: 1\n", "", "version", None, "nothing", "1"),
    ("batch: 8", "batch: eight", "batch", 7, "'eight'", COUNT),
    ("batch: 8", "batch: 8.0", "batch", 7, "8.0", COUNT),
    ("batch: 8", "batch: 0", "batch", 7, "0", COUNT),
    ("batch: 8", "batch:", "batch", 7, "null", COUNT),
    ("batch: 8", "batch: true", "batch", 7, "true", COUNT),
    ("batch: 8", "batch: [8]", "batch", 7, "a list of 1", COUNT),
    ("batch: 8\n", "", "batch", None, "nothing", COUNT),
    ("batch: 8", "batch: 8\nbatch: 16", "batch", 8, "the key a second time (first on line 7)", "each key once"),
    (
        "accumulation: 1",
        "acumulation: 1",
        "acumulation",
        8,
        "an unknown key (did you mean accumulation?)",
        "version, ...",
    ),
    ("seed: 0", "seed: 0\nzebra: 1", "zebra", 12, "an unknown key", "version, model, mesh, backend, batch, ..."),
    (
        "seed: 0",
        'seed: 0\n"two\\nlines": 1',
        "two lines",
        12,
        "an unknown key",
        "version, model, mesh, backend, batch, ...",
    ),
    ("sequence: 128", "sequence: -1", "sequence", 9, "-1", COUNT),
    ("backend: gloo", "backend: mpi", "backend", 6, "'mpi'", "gloo, nccl"),
    ("dtype: float32", "dtype: fp32", "dtype", 10, "'fp32'", "float32, bfloat16, float64"),
    ("seed: 0", "seed: -1", "seed", 11, "-1", "a whole number from 0 to 2^63 - 1"),
    ("seed: 0", "seed: " + "9" * 5000, "seed", 11, "5000 digits", "plain values of a usual size"),
    (f"  sha256: {SHA}\n", "", "model.sha256", 2, "nothing", "the SHA-256 of the config file..."),
    (SHA, "0" * 63 + "g", "model.sha256", 4, f"'{'0' * 63}g'", "the SHA-256 of the config file, 64 digits..."),
    (SHA, "ab" * 32, "model.sha256", 4, "ab" * 32, f"{SHA}, that of config.json as it is now..."),
    ("config: config.json", "config: 3", "model.config", 3, "3", "text that is not empty"),
    ("config: config.json", "file: config.json", "model.file", 3, "an unknown key", "config, sha256"),
    ("tensor: 4}", "tensor: four}", "mesh.tensor", 5, "'four'", COUNT),
    ("tensor: 4}", "tensor: 0}", "mesh.tensor", 5, "0", COUNT),
    ("tensor: 4}", "tensor: 4, data: 2}", "mesh.data", 5, "the key a second time (first on line 5)", "each key once"),
    ("tensor: 4}", "1: 4}", "mesh", 5, "the key 1", "keys that are text..."),
    ("tensor: 4}", "a-b: 4}", "mesh.a-b", 5, "the axis name 'a-b'", "a name of letters, digits and _..."),
    ("{data: 2, tensor: 4}", "{}", "mesh", 5, "an empty mapping", "a mapping of at least 1 key, each value a whole..."),
    ("{data: 2, tensor: 4}", "[2, 4]", "mesh", 5, "a list of 2", "a mapping of at least 1 key, each value a whole..."),
    ("n: [tensor]", "n: [tensr]", f"{QKV}.n", 15, "the axis 'tensr'", "the mesh's axes (data, tensor)"),
    ("n: [tensor]", "n: [data]", QKV, 13, "axis 'data' twice", "one role for each axis"),
    ("n: [tensor]", "n: [3]", f"{QKV}.n[0]", 15, "3", "text that is not empty"),
    ("n: [tensor]", "o: [tensor]", f"{QKV}.o", 15, "an unknown key", LAYOUT_KEYS),
    ("n: [tensor]", "n: [tensor]\n    x: whole", f"{QKV}.x", 16, "'whole'", WORDS_X),
    ("n: [tensor]", "n: [tensor]\n    x: 3", f"{QKV}.x", 16, "3", f"one of {WORDS_X}, or a mapping..."),
    ("{data: sharded}", "{tensor: sharded}", f"{QKV}.w", 16, "axis 'tensor'", "the axes of its missing role (data)"),
    ("{data: sharded}", "{data: shared}", f"{QKV}.w", 16, "'shared'", "sharded, replicated"),
    ("{data: sharded}", "{data: 1}", f"{QKV}.w.data", 16, "1", "sharded, replicated"),
    ("overlap: blocking", "overlap: rings", f"{QKV}.overlap", 17, "'rings'", "blocking, async, ring"),
    ("overlap: blocking", "save_x: all", f"{QKV}.save_x", 17, "'all'", "shard, gathered, source"),
    ("overlap: blocking", "chunks: -1", f"{QKV}.chunks", 17, "-1", "a whole number of at least 0"),
    ("overlap: blocking", "reduce_dtype: bf16", f"{QKV}.reduce_dtype", 17, "'bf16'", "same, float32"),
    ("'*': sequence-parallel", "'*': sequence", "layouts.*", 18, "'sequence'", PRESETS),
    (
        "'*': sequence-parallel",
        "'*': 3",
        "layouts.*",
        18,
        "3",
        f"one of {PRESETS}, or a mapping with the keys {LAYOUT_KEYS}",
    ),
    ("'*': replicate", "'*': zero3", "params.*", 19, "'zero3'", STORED),
    ("'*': replicate", "'*': {level: zero3}", "params.*.level", 19, "'zero3'", LEVELS),
    (
        "'*': replicate",
        "'*': {level: optimizer, keep: true}",
        "params.*.keep",
        19,
        "true at level optimizer",
        "level parameters",
    ),
    ("'*': replicate", "'*': {level: parameters, axes: [pipe]}", "params.*.axes", 19, "the axis 'pipe'", AXES),
    ("seed: 0", "seed: 0\nbucket: -1", "bucket", 12, "-1", "whole bytes, or a number with..."),
    ("seed: 0", "seed: 0\nbucket: 25MB", "bucket", 12, "'25MB'", "25MiB, where 1 MiB = 2^20..."),
    ("seed: 0", "seed: 0\nin_flight: 0", "in_flight", 12, "0", COUNT),
    (
        "seed: 0",
        "seed: 0\nmaster_dtype: fp32",
        "master_dtype",
        12,
        "'fp32'",
        "one of float32, bfloat16, float64, or null",
    ),
    ("seed: 0", "seed: 0\nfallback: yes", "fallback", 12, "'yes'", "true or false"),
    ("recompute: {}", "recompute: {'*': full}", "recompute.*", 20, "'full', which is not available yet", "none, block"),
    ("[4096, 1024]", "[1024, 4096]", "arena.float32[1]", 22, "4096 after 1024", "slot sizes in bytes, largest first"),
    ("[4096, 1024]", "[4096, 1KiB]", "arena.float32[1]", 22, "'1KiB'", COUNT),
    ("[4096, 1024]", "4096", "arena.float32", 22, "4096", f"a list, each item {COUNT}"),
    ("  float32: [", "  float33: [", "arena.float33", 22, "the element type 'float33'", ", ".join(DTYPES)),
    ("{forward: 10", "{foward: 10", "predicted.peak.foward", 24, "the phase 'foward'", "forward, loss, backward, step"),
    ("  saved: 5", "  saved: -5", "predicted.saved", 25, "-5", "a whole number of at least 0"),
    ("  saved: 5\n", "", "predicted.saved", 23, "nothing", "a whole number of at least 0"),
    ("time: 1e-3", "time: .nan", "predicted.time", 27, "nan", "a number of at least 0, or null"),
    (
        "seed: 0",
        "seed: !!python/object:os.system 0",
        "seed",
        11,
        "the tag 'tag:yaml.org,2002:python...",
        "plain YAML without...",
    ),
    (
        "recompute: {}",
        "recompute: &a {b: *a}",
        "recompute.b",
        20,
        "an alias of a value that contains it",
        "values that end",
    ),
    (
        "recompute: {}",
        "recompute: {",
        "",
        22,
        "expected ',' or '}', but got ':'",
        "one YAML document of keys and values...",
    ),
    ("seed: 0", "\tseed: 0", "", 11, "character '\\t' that cannot start any token", "one YAML document..."),
    ("seed: 0", "seed: 0\n---\na: 1", "", 12, "another document", "one YAML document..."),
    ("seed: 0", "seed: *nowhere", "", 11, "undefined alias 'nowhere'", "one YAML document..."),
    (PLAN, "", "", None, "an empty file", "a mapping of keys to values"),
    (PLAN, "# nothing but a comment\n", "", None, "an empty file", "a mapping of keys to values"),
    (PLAN, "- 1\n- 2\n", "", None, "a list of 2", "a mapping of keys to values"),
    (PLAN, "hello\n", "", None, "'hello'", "a mapping of keys to values"),
    (PLAN, "a: \x00", "", None, "unacceptable character #x0000...", "printable text"),
    (PLAN, "[" * 5000, "", None, "hundreds of nested values", "a few"),
]

CLUSTERS: list[Case] = [
    ("version: 1", "version: 3", "version", 1, "3", "1"),
    ("hosts: 2", "hosts: 0", "hosts", 2, "0", COUNT),
    (
        "devices_per_host: 8",
        "devices: 8",
        "devices",
        3,
        "an unknown key (did you mean device?)",
        "version, hosts, devices_per_host, device, links",
    ),
    ("80GiB", "80GB", "device.memory", 6, "'80GB'", "80GiB, where 1 GiB = 2^30 bytes..."),
    ("80GiB", "lots", "device.memory", 6, "'lots'", "whole bytes, or a number with B, KiB, MiB, GiB or TiB..."),
    ("80GiB", "0", "device.memory", 6, "0", "a size above 0..."),
    ("80GiB", "[80]", "device.memory", 6, "a list of 1", "whole bytes, or a number with B..."),
    ("  memory: 80GiB\n", "", "device.memory", 4, "nothing", "a size above 0..."),
    ("9.9e14", "-1", "device.flops.bfloat16", 7, "-1", "a number above 0"),
    ("9.9e14", "fast", "device.flops.bfloat16", 7, "'fast'", "a number above 0"),
    ("latency: 1e-6, ", "", "links.within_host.latency", 9, "nothing", "a number of at least 0"),
    (
        "bandwidth: 5e10",
        "bandwith: 5e10",
        "links.between_hosts.bandwith",
        10,
        "an unknown key (did you mean bandwidth?)",
        "latency, ...",
    ),
    ("bandwidth: 5e10", "bandwidth: .inf", "links.between_hosts.bandwidth", 10, "inf", "a number above 0"),
    (
        "within_host: {latency: 1e-6, bandwidth: 4.5e11}",
        "within_host: 3",
        "links.within_host",
        9,
        "3",
        "a mapping with the keys...",
    ),
]

TEXT, METRICS = "  text: ['text/*.txt']\n", "metrics: [jsonl, tensorboard]"
ONE_KIND = "exactly one of text, jsonl, parquet"
GLOB_JSONL, GLOB_PARQUET = "a path or glob of JSON-lines files", "a path or glob of parquet files"

RUNS: list[Case] = [
    ("version: 1", "version: 0", "version", 1, "0", "1"),
    (
        "plan: plan.yaml",
        "plan: plans.yaml",
        "plan",
        2,
        "'plans.yaml', which is no file in...",
        "the path of a plan file...",
    ),
    ("plan: plan.yaml\n", "", "plan", None, "nothing", "text that is not empty"),
    (
        "'text/*.txt'",
        "'text/*.md'",
        "data.text[0]",
        4,
        "'text/*.md', which matches no file in...",
        "a path or glob of text...",
    ),
    (
        "'text/*.txt'",
        "text/a.txt, b.txt",
        "data.text[1]",
        4,
        "'b.txt', which matches no file in...",
        "a path or glob of text...",
    ),
    ("['text/*.txt']", "[]", "data.text", 4, "an empty list", "a list of at least 1, each item text..."),
    ("['text/*.txt']", "a.txt", "data.text", 4, "'a.txt'", "a list of at least 1, each item text..."),
    (
        "tokenizer.json",
        "tok.json",
        "data.tokenizer",
        5,
        "'tok.json', which is no file in...",
        "the path of a tokenizer.json...",
    ),
    ("steps: 60", "steps: 0", "steps", 6, "0", COUNT),
    ("learning_rate: 1e-3", "learning_rate: 0", "learning_rate", 7, "0", "a number above 0"),
    ("learning_rate: 1e-3", "lr: 1e-3", "lr", 7, "an unknown key", "version, plan, data, steps, learning_rate..."),
    ("learning_rate: 1e-3", "learning_rate: '1e-3'", "learning_rate", 7, "'1e-3'", "a number above 0"),
    ("weight_decay: 0", "weight_decay: -0.1", "weight_decay", 8, "-0.1", "a number of at least 0"),
    ("[0.9, 0.95]", "[0.9, 1.0]", "betas[1]", 9, "1.0", "a number of at least 0 and below 1"),
    ("[0.9, 0.95]", "[0.9]", "betas[1]", 9, "nothing", "a number of at least 0 and below 1"),
    ("[0.9, 0.95]", "[0.9, 0.9, 0.9]", "betas", 9, "a list of 3", "a list of: a number..."),
    ("output: out", "output: plan.yaml", "output", 10, "'plan.yaml', which is a file", "a directory..."),
    ("record: true", "record: yes", "record", 11, "'yes'", "true or false"),
    (
        "cluster: cluster.yaml",
        "cluster: none.yaml",
        "cluster",
        12,
        "'none.yaml', which is no file in...",
        "the path of a cluster...",
    ),
    (TEXT, "  jsonl: ['text/*.md']\n", "data.jsonl[0]", 4, "'text/*.md', which matches no file in...", GLOB_JSONL),
    (TEXT, "  parquet: [a.pq]\n", "data.parquet[0]", 4, "'a.pq', which matches no file in...", GLOB_PARQUET),
    (TEXT, TEXT + "  jsonl: [held.jsonl]\n", "data", 3, "text and jsonl", ONE_KIND),
    (TEXT, "", "data", 3, "none of them", ONE_KIND),
    (TEXT, "  text:\n", "data.text", 4, "null", "a list of at least 1, each item text that is not empty"),
    (TEXT, "  text: ['']\n", "data.text[0]", 4, "''", "text that is not empty"),
    (TEXT, "  csv: [a.csv]\n", "data.csv", 4, "an unknown key", "text, jsonl, parquet, field, tokenizer"),
    (TEXT, TEXT + "  field: body\n", "data.field", 5, "'body' beside text", "a field beside jsonl or parquet"),
    (TEXT, "  jsonl: [held.jsonl]\n  field: 3\n", "data.field", 5, "3", "text that is not empty"),
    (TEXT, "  jsonl: [held.jsonl]\n  field: ''\n", "data.field", 5, "''", "text that is not empty"),
    (METRICS, "metrics: jsonl", "metrics", 13, "'jsonl'", "a list, each item one of jsonl, tensorboard"),
    (METRICS, "metrics: null", "metrics", 13, "null", "a list, each item one of jsonl, tensorboard"),
    (METRICS, "metrics: [wandb]", "metrics[0]", 13, "'wandb'", "jsonl, tensorboard"),
    (METRICS, "metrics: [jsonl, jsonl]", "metrics[1]", 13, "'jsonl' a second time", "each word once"),
    (
        "[held.jsonl]",
        "[gone.jsonl]",
        "evaluation.jsonl[0]",
        15,
        "'gone.jsonl', which matches no file in...",
        GLOB_JSONL,
    ),
    ("  jsonl: [held.jsonl]\n", "", "evaluation", 14, "none of them", ONE_KIND),
    ("  field: body", "  text: [text/a.txt]", "evaluation", 14, "text and jsonl", ONE_KIND),
    (
        "  field: body",
        "  tokenizer: tokenizer.json",
        "evaluation.tokenizer",
        16,
        "an unknown key",
        "text, jsonl, parquet, field, every, batches",
    ),
    ("  every: 10\n", "", "evaluation.every", 14, "nothing", COUNT),
    ("every: 10", "every: 0", "evaluation.every", 17, "0", COUNT),
    ("every: 10", "every: 2.5", "evaluation.every", 17, "2.5", COUNT),
    (
        "every: 10",
        "every: 61",
        "evaluation.every",
        17,
        "61, which none of the 60 steps...",
        "a whole number of at most 60",
    ),
    ("batches: 2", "batches: '2'", "evaluation.batches", 18, "'2'", COUNT),
    ("batches: 2", "batches: 0", "evaluation.batches", 18, "0", COUNT),
    ("  directory: saved\n", "", "checkpoint.directory", 19, "nothing", "text that is not empty"),
    (
        "directory: saved",
        "directory: held.jsonl",
        "checkpoint.directory",
        20,
        "'held.jsonl', which is a file",
        "a dir...",
    ),
    ("every: 20", "every: 0", "checkpoint.every", 21, "0", COUNT),
    ("  every: 20\n", "", "checkpoint.every", 19, "nothing", COUNT),
    ("keep: 3", "keep: 0", "checkpoint.keep", 22, "0", COUNT),
    ("keep: 3", "kept: 3", "checkpoint.kept", 22, "an unknown key (did you mean keep?)", "directory, every, keep"),
    (
        "weights: pretrained",
        "weights: held.jsonl",
        "weights",
        23,
        "'held.jsonl', which is no directory in...",
        "a Hugging Face directory with safetensors files...",
    ),
    ("export: trained", "export: text", "export", 24, "'text', which is not empty", "a directory that is empty or..."),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which the plan, cluster and run above are right."""
    (tmp_path / "text").mkdir()
    (tmp_path / "pretrained").mkdir()
    for name, text in {
        "config.json": CONFIG,
        "tokenizer.json": "{}",
        "text/a.txt": "a",
        "text/b.txt": "b",
        "held.jsonl": '{"body": "b"}\n',
        "plan.yaml": PLAN,
        "cluster.yaml": CLUSTER,
        "run.yaml": RUN,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def fault(schema: Any, path: Path) -> str:
    with pytest.raises(InputError) as caught:
        schema.load(path)
    return str(caught.value)


KINDS = [(Plan, PLAN, case) for case in PLANS]
KINDS += [(Cluster, CLUSTER, case) for case in CLUSTERS]  # type: ignore[misc]
KINDS += [(Run, RUN, case) for case in RUNS]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schema", "right", "case"), KINDS, ids=[f"{s.__name__}-{c[2]}-{c[4][:24]!r}" for s, _, c in KINDS]
)
def test_malformed_file_is_one_line(schema: Any, right: str, case: Case, place: Path) -> None:
    old, new, key, line, found, allowed = case
    assert right.count(old) == 1
    path = place / "bad.yaml"
    path.write_text(right.replace(old, new))
    message = fault(schema, path)
    assert message.splitlines() == [message]
    at = " ".join(part for part in (key, f"(line {line})" if line else "") if part)
    start = f"{path}: {at + ': ' if at else ''}found "
    assert message.startswith(start)
    told, _, rest = message.removeprefix(start).partition("; allowed: ")
    for text, expected in ((told, found), (re.sub(r" \(and \d+ more\)$", "", rest), allowed)):
        assert text.startswith(expected[:-3]) if expected.endswith("...") else text == expected


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its path."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("schema", "right", "case"), KINDS, ids=[f"{s.__name__}-{c[2]}-{c[4][:24]!r}" for s, _, c in KINDS]
)
def test_commands_refuse_a_malformed_file_with_2_and_overwrite_nothing(
    schema: Any, right: str, case: Case, place: Path, one_rank: None
) -> None:
    bad = place / "bad.yaml"
    bad.write_text(right.replace(case[0], case[1]))
    (place / "out").mkdir()
    for name in ("figures.json", "figures.svg", "out/tokens.npy", "out/metrics.jsonl", "out/evaluation-tokens.npy"):
        (place / name).write_text("of an earlier run")
    figures = ["--json", place / "figures.json", "--svg", place / "figures.svg"]
    before = contents(place)
    if schema is Plan:
        line = refused("rehearse", bad, *figures)
    elif schema is Cluster:
        line = refused("rehearse", place / "plan.yaml", "--cluster", bad, *figures)
    else:
        line = refused("train", bad)
    assert line == f"error: {fault(schema, bad)}\n"
    assert contents(place) == before


def test_train_refuses_a_malformed_plan_too(place: Path, one_rank: None) -> None:
    (place / "plan.yaml").write_text(PLAN.replace("batch: 8", "batch: eight"))
    before = contents(place)
    assert f"{place / 'plan.yaml'}: batch (line 7): found 'eight'" in refused("train", place / "run.yaml")
    assert contents(place) == before


def test_there_are_enough_malformed_files() -> None:
    assert len(KINDS) >= 40


@pytest.mark.parametrize("schema", [Plan, Cluster, Run])
def test_a_path_that_holds_no_text_is_one_line(schema: Any, tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert fault(schema, missing) == f"{missing}: found no such file; allowed: the path of a YAML file"
    assert fault(schema, binary).startswith(f"{binary}: found bytes that are not UTF-8")
    assert fault(schema, tmp_path).startswith(f"{tmp_path}: found no way in (is a directory)")


def test_the_first_fault_in_file_order_is_told_and_the_others_counted(place: Path) -> None:
    text = (
        PLAN.replace("seed: 0", "seed: x").replace("batch: 8", "batch: y").replace("mesh: {data: 2", "mesh: {data: z")
    )
    (place / "bad.yaml").write_text(text.replace("sequence: 128\n", ""))
    message = fault(Plan, place / "bad.yaml")
    assert message == f"{place / 'bad.yaml'}: mesh.data (line 5): found 'z'; allowed: {COUNT} (and 3 more)"


def test_a_misspelt_key_is_told_before_the_key_that_is_missing_for_it(place: Path) -> None:
    (place / "bad.yaml").write_text(PLAN.replace("  sha256:", "  sha:").replace("sequence: 128", "sequenc: 128"))
    assert "model.sha (line 4): found an unknown key (did you mean sha256?)" in fault(Plan, place / "bad.yaml")
    assert fault(Plan, place / "bad.yaml").endswith("(and 3 more)")


def test_a_preset_needs_its_axes_in_the_mesh(place: Path) -> None:
    (place / "bad.yaml").write_text(PLAN.replace("tensor: 4}", "model: 4}").replace("[tensor]", "[model]"))
    message = fault(Plan, place / "bad.yaml")
    assert (
        "layouts.* (line 18): found sequence-parallel, which uses the axis 'tensor'; allowed: the mesh's axes"
        in message
    )


# What is right


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
        "plan: batch: found 'x'; allowed: a whole": {"batch": "x"},
        "plan: bach: found an unknown key (did you mean batch?)": {"bach": 3},
        "plan: layouts.*.m: found the axis 'z'": {"layouts": {"*": GridLayout(m=("z",))}},
        "plan: mesh: found an empty mapping": {"mesh": {}},
    }
    for start, change in changes.items():
        with pytest.raises(InputError) as caught:
            plan.evolve(**change)
        assert str(caught.value).startswith(start)
    with pytest.raises(InputError, match=r"^config: found no file"):
        Plan.for_config(place / "none.json", mesh={"data": 1}, layout="replicate", batch=1, sequence=1)


def test_evolve_leaves_the_original(place: Path) -> None:
    plan = Plan.load(place / "plan.yaml")
    other = plan.evolve(batch=16, predicted=None)
    assert (plan.batch, other.batch, other.predicted) == (8, 16, None)
    assert other.config_path == plan.config_path and other != plan
    with pytest.raises(Exception, match="frozen"):
        plan.batch = 3


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
        save_x=draw(st.sampled_from(["shard", "gathered", "source"])),
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
    arena=st.none() | st.dictionaries(st.sampled_from(DTYPES), st.lists(st.integers(1, 2**40)), max_size=2),
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
            batch=4,
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
        "version: 1\nhosts: 1\ndevices_per_host: 2\ndevice: {name: cpu, memory: 1024}\n"
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
