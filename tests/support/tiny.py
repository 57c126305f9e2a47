"""A tiny Llama whose sizes divide by 1, 2, 3 and 4, its plans, its batches, and a run of it on this rank."""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.spec.plan import Plan
from shardwright.step.train_step import record_steps
from support import dense

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 240,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
BATCH, SEQUENCE = 12, 16


@functools.cache
def config_path(**changes) -> Path:
    """A config.json of the tiny Llama with these changes, written once a process."""
    return write_config({**FIELDS, **changes})


def write_config(fields: dict) -> Path:
    """A config.json of these fields."""
    directory = tempfile.mkdtemp(prefix="tiny")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(fields))
    return path


def plan_of(axes: dict[str, int], layout: str | dict, path: Path | None = None, **changes) -> Plan:
    settings = {"micro_batch": BATCH, "sequence": SEQUENCE, **changes}
    if isinstance(layout, dict):
        return Plan.for_config(path or config_path(), mesh=axes, layout=sw.GridLayout(), **settings).evolve(
            layouts=layout
        )
    return Plan.for_config(path or config_path(), mesh=axes, layout=layout, **settings)


def batches(plan: Plan, steps: int, place: int = 0) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The same global batches for every layout; the rows of the data rank at ``place``."""
    generator = torch.Generator().manual_seed(7)
    rows = -(-plan.micro_batch // math.prod(plan.mesh[axis] for axis in plan.batch_axes))
    found = []
    for _ in range(steps):
        step = []
        for _ in range(plan.accumulation):
            text = torch.randint(0, 24, (plan.micro_batch, plan.sequence + 1), generator=generator)
            # Something to learn: few tokens are used, and every second one tells the next.
            text[:, 1::2] = text[:, 0:-1:2] + 24
            mine = text[place * rows : (place + 1) * rows]
            step.append((mine[:, :-1].clone(), mine[:, 1:].clone()))
        found.append(step)
    return found


def build(plan: Plan, path: Path | None = None):
    """(model, mesh) of this rank."""
    mesh = dense.mesh_of(**plan.mesh)
    model = build_meta(load_config(path or config_path()), plan.stored_dtype)
    return sw.parallelize(model, mesh, plan), mesh


def train(plan: Plan, steps: int, record: int = 0, path: Path | None = None, learning_rate: float = 3e-3):
    """Losses of ``steps`` steps, and the trace of the first ``record``."""
    model, mesh = build(plan, path)
    step = sw.TrainStep(model, mesh, plan, learning_rate=learning_rate)
    data = batches(plan, steps, sw.Runtime.of(mesh).group(plan.batch_axes).index)
    losses, trace = [], None
    if record:
        losses, trace = record_steps(step, data[:record])
    losses += [step(micro) for micro in data[record:]]
    return [loss.item() for loss in losses], trace
