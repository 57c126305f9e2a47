"""A model without a rule table: data parallel, its modules as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright._errors import InputError
from shardwright._forward import BeginForward, CausalLoss
from shardwright._plan import Plan
from shardwright.comm import Runtime
from shardwright.layers import VocabParallelLoss, attention
from shardwright.layers.classes import check_ids
from shardwright.linear.carrier import TokenShape
from shardwright.params.buffers import fill_buffers
from shardwright.params.initial import Source
from shardwright.params.lending import lend


def unsplit(model: Any, mesh: DeviceMesh, runtime: Runtime, plan: Plan, source: Source) -> Any:
    """A model without a rule table: data parallel over the plan's data axes, its modules as they are."""
    ranks = runtime.group(plan.data_axes).size
    if plan.batch % ranks:
        raise InputError(
            f"batch: found {plan.batch}; allowed: a multiple of {'×'.join(plan.data_axes)} = {ranks}, since a model "
            "without a rule table does not split sequences"
        )
    runtime.arena.slots = plan.arena
    lend(model, mesh, plan.data_axes, plan.sharding_for, plan.in_flight, source=source)
    fill_buffers(model, torch.device(mesh.device_type))
    model.config.use_cache = False
    if getattr(model, "_supports_attention_backend", False):
        model.config._attn_implementation = attention.register()
    model.loss_function = CausalLoss(VocabParallelLoss(mesh, (), plan.data_axes))
    model.get_input_embeddings().register_forward_pre_hook(check_ids)
    model.register_forward_pre_hook(BeginForward(TokenShape(), None), with_kwargs=True)
    return model
