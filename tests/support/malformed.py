"""Right plan, cluster and run files, and how each may be wrong: what the one line must say."""

from __future__ import annotations

import hashlib

from shardwright.spec.dtypes import DTYPES
from shardwright.spec.presets import presets

CONFIG = '{"model_type": "llama"}'
SHA = hashlib.sha256(CONFIG.encode()).hexdigest()

PLAN = f"""\
version: 2
model:
  config: config.json
  sha256: {SHA}
mesh: {{data: 2, tensor: 4}}
backend: gloo
micro_batch: 8
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
version: 2
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
STORED = f"one of {LEVELS}, or a mapping with the keys level, axes, keep, reduce_dtype, bucket, reshard_after_forward"
AXES = "the mesh's axes (data, tensor)"
QKV = "layouts.model.layers.*.qkv"

# Old text → new text, then what the line must say: the key, the line of the file, what was found, what is allowed.
# Three dots at the end stand for the rest.
Case = tuple[str, str, str, int | None, str, str]

PLANS: list[Case] = [
    ("version: 2", "version: 3", "version", 1, "3", "2"),
    ("version: 2", "version: '2'", "version", 1, "'2'", "2"),
    ("version: 2", "version: true", "version", 1, "true", "2"),
    ("version: 2", "version: 2.0", "version", 1, "2.0", "2"),
    ("version: 2\n", "", "version", None, "nothing", "2"),
    ("micro_batch: 8", "micro_batch: eight", "micro_batch", 7, "'eight'", COUNT),
    ("micro_batch: 8", "micro_batch: 8.0", "micro_batch", 7, "8.0", COUNT),
    ("micro_batch: 8", "micro_batch: 0", "micro_batch", 7, "0", COUNT),
    ("micro_batch: 8", "micro_batch:", "micro_batch", 7, "null", COUNT),
    ("micro_batch: 8", "micro_batch: true", "micro_batch", 7, "true", COUNT),
    ("micro_batch: 8", "micro_batch: [8]", "micro_batch", 7, "a list of 1", COUNT),
    ("micro_batch: 8\n", "", "micro_batch", None, "nothing", COUNT),
    (
        "micro_batch: 8",
        "micro_batch: 8\nmicro_batch: 16",
        "micro_batch",
        8,
        "the key a second time (first on line 7)",
        "each key once",
    ),
    (
        "accumulation: 1",
        "acumulation: 1",
        "acumulation",
        8,
        "an unknown key (did you mean accumulation?)",
        "version, ...",
    ),
    ("seed: 0", "seed: 0\nzebra: 1", "zebra", 12, "an unknown key", "version, model, mesh, backend, micro_batch, ..."),
    (
        "seed: 0",
        'seed: 0\n"two\\nlines": 1',
        "two lines",
        12,
        "an unknown key",
        "version, model, mesh, backend, micro_batch, ...",
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
    ("overlap: blocking", "save_x: all", f"{QKV}.save_x", 17, "'all'", "shard, gathered"),
    ("overlap: blocking", "save_x: source", f"{QKV}.save_x", 17, "'source'", "shard, gathered"),
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
    ("'*': replicate", "'*': zero9", "params.*", 19, "'zero9'", STORED),
    ("'*': replicate", "'*': {level: zero9}", "params.*.level", 19, "'zero9'", LEVELS),
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
    ("version: 2", "version: 3", "version", 1, "3", "2"),
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
    (TEXT, "  csv: [a.csv]\n", "data.csv", 4, "an unknown key", "text, jsonl, parquet, field, tokenizer, end_token"),
    (TEXT, "  end_token: ''\n" + TEXT, "data.end_token", 4, "''", "text that is not empty, or null"),
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
