"""The layouts of one small Llama on four ranks that bench/planner.py measures and predicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.spec.plan import Plan

MESHES: dict[str, dict[str, int]] = {
    "data=2,tensor=2": {"data": 2, "tensor": 2},
    "data=4": {"data": 4},
    "tensor=4": {"data": 1, "tensor": 4},
    "i=1,j=2,l=2": {"i": 1, "j": 2, "l": 2},
    "i=2,j=2,l=1": {"i": 2, "j": 2, "l": 1},
}
"""The first axis is the slowest: with two hosts, groups along it span both."""


@dataclass(frozen=True)
class Layout:
    """mesh: a name of MESHES. layout: a preset. rest: further fields of the plan."""

    mesh: str
    layout: str
    rest: Mapping[str, dict[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [value for values in self.rest.values() for value in values.values()]
        return " · ".join((self.mesh, self.layout, *words))


def _stored(level: str) -> dict[str, dict[str, str]]:
    return {"params": {"*": level}}


RECOMPUTED = {"recompute": {"model.layers.*": "block"}}

LAYOUTS = (
    Layout("data=2,tensor=2", "sequence-parallel"),
    Layout("data=2,tensor=2", "sequence-parallel-keep"),
    Layout("data=2,tensor=2", "sequence-parallel-async"),
    Layout("data=2,tensor=2", "sequence-parallel-ring"),
    Layout("data=2,tensor=2", "tensor-all-reduce"),
    Layout("data=2,tensor=2", "sequence-parallel", _stored("parameters")),
    Layout("data=2,tensor=2", "sequence-parallel", RECOMPUTED),
    Layout("data=2,tensor=2", "sequence-parallel-async", RECOMPUTED),
    Layout("data=2,tensor=2", "tensor-all-reduce", _stored("gradients")),
    Layout("data=4", "replicate"),
    Layout("data=4", "replicate", _stored("optimizer")),
    Layout("data=4", "replicate", _stored("gradients")),
    Layout("data=4", "replicate", _stored("parameters")),
    Layout("data=4", "replicate", RECOMPUTED),
    Layout("tensor=4", "sequence-parallel"),
    Layout("tensor=4", "sequence-parallel-async"),
    Layout("tensor=4", "tensor-all-reduce"),
    Layout("tensor=4", "sequence-parallel-ring"),
    Layout("i=1,j=2,l=2", "grid-scatter"),
    Layout("i=1,j=2,l=2", "grid-reduce"),
    Layout("i=2,j=2,l=1", "grid-scatter"),
)


@dataclass(frozen=True)
class Task:
    """The model, and the batch over all ranks."""

    layers: int
    width: int
    batch: int
    sequence: int

    def write_config(self, path: Path) -> None:
        """A Llama's config.json."""
        fields = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 64,
            "num_key_value_heads": self.width // 64,
            "vocab_size": 2048,
            "max_position_embeddings": self.sequence,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields))

    def plan(self, layout: Layout, config: Path) -> Plan:
        """The plan of that layout."""
        return Plan.for_config(
            config,
            mesh=MESHES[layout.mesh],
            layout=layout.layout,
            micro_batch=self.batch,
            sequence=self.sequence,
            dtype="float32",
            **layout.rest,
        )
