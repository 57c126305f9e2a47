"""shardwright fits a model onto devices: the fastest parallel layout under a memory limit, known to the byte.

One idea: every linear layer is a matrix product on a grid of devices, and every memory trick is a choice of what each
operand does on the mesh axes that it does not need. Names load on first use; ``import shardwright`` alone imports no
third-party package.
"""

from importlib import import_module
from typing import Any

_HOMES = {  # public name → the file that defines it (":" and the name there, where it is another)
    "GradientBucket": "shardwright.runtime.bucket",
    "GridLayout": "shardwright.spec.layout",
    "GridLinear": "shardwright.linear.grid_linear",
    "Plan": "shardwright.spec.plan",
    "Cluster": "shardwright.spec.cluster",
    "Site": "shardwright.spec.site",
    "presets": "shardwright.spec.presets",
    "Trace": "shardwright.trace",
    "record": "shardwright.trace",
    "Runtime": "shardwright.runtime.runtime",
    "parallelize": "shardwright.models.parallelize",
    "plan": "shardwright.search.plan",
    "rehearse": "shardwright.simulate.rehearsal",
    "shard": "shardwright.unsharding.shard",
    "ShardedModule": "shardwright.unsharding.sharded_module",
    "MixedPrecision": "shardwright.unsharding.mixed_precision",
    "no_sync": "shardwright.unsharding.shard",
    "discard_accumulated": "shardwright.unsharding.shard",
    "DivergenceError": "shardwright.comm.divergence",
    "clip_grad_norm_": "shardwright.step.clipping",
    "grad_norm": "shardwright.step.clipping",
    "TrainStep": "shardwright.step.train_step",
    "VocabParallelLoss": "shardwright.layers.loss",
    "FusedAdamW": "shardwright.step.train_step",
    "Machine": "shardwright.simulate.machine",
    "Timeline": "shardwright.simulate.timeline",
    "timeline": "shardwright.simulate.timeline",
    "certify": "shardwright.certificate.certify",
    "Certificate": "shardwright.certificate.certify",
    "Uncertified": "shardwright.certificate.certify",
    "InFlightError": "shardwright.params.schedule",
    "RunState": "shardwright.checkpoint.manifest",
    "save_checkpoint": "shardwright.checkpoint.training_state:save",
    "load_checkpoint": "shardwright.checkpoint.training_state:load",
    "latest_checkpoint": "shardwright.checkpoint.training_state:latest",
    "save_pretrained": "shardwright.checkpoint.export",
    "from_safetensors": "shardwright.checkpoint.pretrained",
    "InputError": "shardwright.errors",
    "DoesNotFit": "shardwright.errors",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
