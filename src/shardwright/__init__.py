"""shardwright fits a model onto devices: the fastest parallel layout under a memory limit, known to the byte.

One idea: every linear layer is a matrix product on a grid of devices, and every memory trick is a choice of what each
operand does on the mesh axes that it does not need. Names load on first use; ``import shardwright`` alone imports no
third-party package.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "GradientBucket": "shardwright.comm",
    "GridLayout": "shardwright.layout",
    "GridLinear": "shardwright.linear",
    "Plan": "shardwright._plan",
    "Cluster": "shardwright.cluster",
    "Site": "shardwright.site",
    "presets": "shardwright.layout",
    "Trace": "shardwright.trace",
    "record": "shardwright.trace",
    "Runtime": "shardwright.comm",
    "parallelize": "shardwright._parallelize",
    "plan": "shardwright.planner.request",
    "rehearse": "shardwright._rehearse",
    "shard": "shardwright.params.lending",
    "no_sync": "shardwright.params.lending",
    "discard_accumulated": "shardwright.params.lending",
    "DivergenceError": "shardwright.comm.divergence",
    "clip_grad_norm_": "shardwright.params.clipping",
    "grad_norm": "shardwright.params.clipping",
    "TrainStep": "shardwright.step",
    "VocabParallelLoss": "shardwright.layers",
    "InputError": "shardwright._errors",
    "DoesNotFit": "shardwright._errors",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
