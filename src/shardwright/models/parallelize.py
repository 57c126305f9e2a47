"""Puts a plan onto a Hugging Face model, in place, without changing its code."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright import trace
from shardwright.errors import InputError
from shardwright.families.table import family_of, has_rule
from shardwright.models.fallback import unsplit
from shardwright.models.fits import check_fits
from shardwright.models.positions import check_positions
from shardwright.models.swap import Swap
from shardwright.overlap.product import names
from shardwright.runtime.runtime import Runtime
from shardwright.spec.plan import Plan
from shardwright.unsharding.retired import retire
from shardwright.values.initial import InDtype, Source, from_seed, from_values, retype

_log = logging.getLogger(__name__)


def parallelize(model: Any, mesh: DeviceMesh, plan: Plan, source: Source | None = None) -> Any:
    """Gives every site of ``model`` its layout; returns the model.

    model: a Hugging Face causal language model, on the meta device (drawn from the plan's seed) or with values (equal
    on every rank; each takes its part). State-dict names stay; parameters become DTensors of the element type in which
    the plan stores them (``master_dtype``, else ``dtype``), whatever it was: values of another type are cast. Called
    with labels it returns this rank's share of the mean loss. source: where shards get their values, if not so.

    From then on modules and parameters stay as they are: what is put in beside them (adapters, wrappers, hooks on
    linears) is refused at the next forward pass. Raises InputError before anything is changed where the plan does not
    fit the model or the mesh, or the model holds what its rule table does not know.
    """
    warning = check_positions(model.config, plan.sequence)
    if warning is not None:
        warnings.warn(warning, stacklevel=2)
    return put(model, mesh, plan, source)


def put(model: Any, mesh: DeviceMesh, plan: Plan, source: Source | None = None) -> Any:
    """``parallelize`` without its warnings, for whoever tells them otherwise."""
    if dict(zip(names(mesh), mesh.shape, strict=True)) != plan.mesh:
        raise InputError(
            f"mesh: found {dict(zip(names(mesh), mesh.shape, strict=True))}; allowed: the plan's {plan.mesh}"
        )
    layouts = check_fits(model, plan)
    with trace.quiet():  # a mesh makes its groups when it is first asked; a rehearsal's has them
        runtime = Runtime.of(mesh, plan.backend)
    if plan.fallback and not has_rule(model.config):
        unsplit(model, mesh, runtime, plan, _stored_source(model, mesh, plan, source))
        model.parallelized = Parallelized(plan, mesh)
        return model
    runtime.arena.slots = plan.arena
    source = _stored_source(model, mesh, plan, source)
    before = list(model.parameters())
    Swap(model, mesh, runtime, family_of(model.config), layouts, source, plan).run()
    for parameter in before:
        retire(parameter)
    model.parallelized = Parallelized(plan, mesh)
    _log.info("parallelized %s: %d sites on %s", type(model).__name__, len(layouts), plan.mesh)
    return model


@dataclass(frozen=True)
class Parallelized:
    """What a model was given to ``parallelize``."""

    plan: Plan
    mesh: DeviceMesh


def _stored_source(model: Any, mesh: DeviceMesh, plan: Plan, source: Source | None) -> Source:
    """``source``, or the default one, in the element type in which the plan stores parameters."""
    dtype = getattr(torch, plan.stored_dtype)
    retype(model, dtype)  # so that what is drawn is drawn in it
    return InDtype(source or _default_source(model, mesh, plan), dtype)


def _default_source(model: Any, mesh: DeviceMesh, plan: Plan) -> Source:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return from_values
    modules = {module: name for name, module in model.named_modules()}
    return from_seed(model._init_weights, modules, plan.seed, torch.device(mesh.device_type))
