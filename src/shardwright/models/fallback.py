"""A model without a rule table: data parallel, its modules, attention and masks as they are."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardwright import trace
from shardwright.errors import InputError
from shardwright.files.patterns import check_patterns
from shardwright.layers.classes import check_ids
from shardwright.layers.dropout import ForwardDraws
from shardwright.layers.loss import VocabParallelLoss
from shardwright.models.buffers import fill_buffers
from shardwright.models.build import build_meta
from shardwright.models.forward import CausalLoss, check_keywords
from shardwright.models.structure import Structure
from shardwright.runtime.runtime import Runtime
from shardwright.spec.layout import GridLayout
from shardwright.spec.plan import Plan
from shardwright.unsharding.shard import Call, shard_groups
from shardwright.values.initial import Source
from shardwright.values.random import key_of

ATTENTION = ("eager", "sdpa")
"""Hugging Face's implementations of attention that run on every device, and in a rehearsal as in the run."""


def unsplit(model: Any, mesh: DeviceMesh, runtime: Runtime, plan: Plan, source: Source) -> Any:
    """Stores the model's parameters as the plan says, over the axes that split the batch; returns the model.

    Attention, masks, routers and dropout are the model's own code. Raises InputError where that code does not do what
    the plan says, before anything is changed.
    """
    data = runtime.group(plan.data_axes)
    _check_plan(plan, data.size)
    _check_model(model)
    recomputed = _recomputed(model, plan)
    if plan.dtype != plan.stored_dtype:
        _retype_buffers(model, plan.dtype)
    runtime.arena.slots = plan.arena
    shard_groups(model, mesh, plan.data_axes, plan.sharding_for, Call(plan.in_flight, source=source))
    fill_buffers(model, torch.device(mesh.device_type), plan.seed, source)
    for block in recomputed:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = functools.partial(
            checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), _views_alike())
        )
    model.config.use_cache = False
    model.loss_function = CausalLoss(VocabParallelLoss(mesh, (), plan.data_axes))
    model.register_forward_hook(model.loss_function.check, with_kwargs=True, always_call=True)
    model.get_input_embeddings().register_forward_pre_hook(check_ids)
    model.forward_draws = ForwardDraws(key_of(plan.seed, f"forward.{data.index}"), torch.device(mesh.device_type))
    Structure(model)
    _Surroundings(model)
    return model


def _check_plan(plan: Plan, ranks: int) -> None:
    why = "since a model without a rule table runs with its linears unsplit"
    if plan.micro_batch % ranks:
        raise InputError(
            f"micro_batch: found {plan.micro_batch}; allowed: a multiple of {'×'.join(plan.data_axes)} = {ranks}, "
            "since a model without a rule table does not split sequences"
        )
    for axis, size in plan.mesh.items():
        if size > 1 and axis not in plan.data_axes:
            raise InputError(f"mesh: found {size} ranks on {axis!r}; allowed: axes that split the batch, {why}")
    for pattern, layout in plan.layouts.items():
        plain = layout == "replicate" if isinstance(layout, str) else layout == GridLayout(m=layout.m)
        if not plain:
            found = layout if isinstance(layout, str) else "a grid with more than m axes"
            raise InputError(f"layouts.{pattern}: found {found}; allowed: replicate, {why}")


def _check_model(model: Any) -> None:
    name, found = type(model).__name__, model.config._attn_implementation
    if found not in ATTENTION:
        raise InputError(f"attn_implementation: found {found!r}; allowed: {', '.join(ATTENTION)}")
    parameters = inspect.signature(model.forward).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        raise InputError(f"{name}: found a loss of its own; allowed: models that pass num_items_in_batch to their loss")


def _recomputed(model: Any, plan: Plan) -> list[Any]:
    """The blocks that the plan computes again in backward."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    wanted = [
        (name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not wanted and plan.recompute:
        raise InputError(f"recompute: found {', '.join(plan.recompute)}; allowed: nothing, since no block recomputes")
    check_patterns("recompute", plan.recompute, [name for name, _ in wanted], "block")
    return [module for name, module in wanted if plan.recompute_for(name) == "block"]


def _retype_buffers(model: Any, dtype: str) -> None:
    """Gives buffers without memory the element types that they have in a model made in ``dtype``."""
    with unset_fake_temporarily(), trace.quiet():
        made = build_meta(copy.deepcopy(model.config), dtype)
    types = {name: buffer.dtype for name, buffer in made.named_buffers()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                with unset_fake_temporarily(), trace.quiet():
                    module._buffers[name] = buffer.to(types[f"{prefix}.{name}".removeprefix(".")])


class _Surroundings:
    """What holds while the model's own forward runs: masks are built alike in run and rehearsal, draws are the plan's.

    The keywords of the call are checked first.
    """

    def __init__(self, model: Any):
        self._takes = set(inspect.signature(model.forward).parameters)
        self._open: list[ExitStack] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_keywords(args, kwargs)
        for name in ("attention_mask", "position_ids"):
            if kwargs.get(name) is not None and name not in self._takes:
                raise InputError(f"{name}: found a value; allowed: nothing, since {type(module).__name__} ignores it")
        around = ExitStack()
        self._open.append(around)
        around.enter_context(_masks_alike(packed=kwargs.get("position_ids") is not None))
        around.enter_context(_views_alike())
        if module.training:
            around.enter_context(module.forward_draws.drawn())

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().close()


def _views_alike() -> AbstractContextManager[None]:
    """Inside, a view that is written to is made anew by what made it, as autograd does on fake tensors in any case."""
    autograd: Any = torch.autograd
    tracking: AbstractContextManager[None] = autograd._force_original_view_tracking(True)
    return tracking


@contextmanager
def _masks_alike(packed: bool) -> Iterator[None]:
    """Inside, Hugging Face builds masks without a look at values, which fake tensors do not have.

    packed: positions were given, and may begin anew within a row; the model's own positions do not.
    """
    from transformers import masking_utils

    library: Any = masking_utils
    names = ("is_tracing", "find_packed_sequence_indices")
    own = {name: getattr(library, name) for name in names}
    library.is_tracing = lambda tensor=None: True
    if not packed:
        library.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        for name in names:
            setattr(library, name, own[name])
