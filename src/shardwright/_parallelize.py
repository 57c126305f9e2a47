"""Puts a plan onto a Hugging Face model, in place, without changing its code.

The residual stream between sites is [1, T_local, h]. Model code that reads the shape [B,S,h] is shown a carrier
(linear/carrier.py): from the embedding to the first block, where positions are built, and inside attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from shardwright._errors import InputError
from shardwright._plan import Plan
from shardwright.comm import Runtime
from shardwright.layers import GridRMSNorm, VocabParallelEmbedding, VocabParallelLoss, attention
from shardwright.layers.loss import IGNORED
from shardwright.layout import GridLayout
from shardwright.linear import GridLinear
from shardwright.linear.carrier import carry, tokens_of
from shardwright.linear.product import Product, names, weight_placements
from shardwright.models import Family, family_of
from shardwright.params import StoredParameter, local_slices, make_parameter
from shardwright.params.initial import Source, from_seed, from_values
from shardwright.site import Site, check_divides, check_edges


def parallelize(model: Any, mesh: DeviceMesh, plan: Plan, source: Source | None = None) -> Any:
    """Gives every site of ``model`` its layout; returns the model.

    model: a Hugging Face causal language model, on the meta device (drawn from the plan's seed) or with values (equal
    on every rank; each takes its part). State-dict names stay; parameters become DTensors. Called with labels it
    returns this rank's share of the mean loss. source: where shards get their values, if not so.

    Raises InputError before anything is changed where the plan does not fit the model or the mesh.
    """
    if dict(zip(names(mesh), mesh.shape, strict=True)) != plan.mesh:
        raise InputError(
            f"mesh: found {dict(zip(names(mesh), mesh.shape, strict=True))}; allowed: the plan's {plan.mesh}"
        )
    family = family_of(model.config)
    layouts = resolve(family, model.config, plan)
    runtime = Runtime.of(mesh, plan.backend)
    runtime.arena.slots = plan.arena
    source = source or _default_source(model, mesh, plan)
    return _Conversion(model, mesh, runtime, family, layouts, source).run()


def resolve(family: Family, config: Any, plan: Plan) -> dict[Site, GridLayout]:
    """Site → layout for the whole model, checked: sizes divide, and edges join."""
    sites = family.sites(config, plan.batch * plan.sequence)
    layouts = {site.name: plan.layout_for(site) for site in sites}
    for site in sites:
        layout = layouts[site.name]
        check_divides(site, layout, plan.mesh)
        ranks = 1
        for axis in layout.m:
            ranks *= plan.mesh[axis]
        if plan.batch % ranks:
            raise InputError(f"batch: found {plan.batch}; allowed: a multiple of {'×'.join(layout.m)} = {ranks}")
    check_edges(sites, layouts)
    return {site: layouts[site.name] for site in sites}


def _default_source(model: Any, mesh: DeviceMesh, plan: Plan) -> Source:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return from_values
    modules = {module: name for name, module in model.named_modules()}
    return from_seed(model._init_weights, modules, plan.seed, torch.device(mesh.device_type))


class _Conversion:
    """The steps of ``parallelize``, over one model."""

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        runtime: Runtime,
        family: Family,
        layouts: Mapping[Site, GridLayout],
        source: Source,
    ):
        self.model, self.mesh, self.runtime, self.family = model, mesh, runtime, family
        self.layouts, self.source = layouts, source

    def run(self) -> Any:
        family, model = self.family, self.model
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        for site, layout in self.layouts.items():
            if site.name == family.embedding:
                self._embedding(site, layout)
            else:
                self._linears(site, layout)
        if tied:
            self._tie()
        stream = next(iter(self.layouts.values())).output_token_axes
        for index in range(len(model.get_submodule(family.blocks))):
            block = f"{family.blocks}.{index}"
            for norm in family.block_norms:
                self._norm(f"{block}.{norm}", stream)
            self._watch_block(model.get_submodule(block), first=index == 0)
        self._norm(family.final_norm, stream)
        self._buffers()
        self._loss()
        model.config.use_cache = False
        model.config._attn_implementation = attention.register()
        model.register_forward_pre_hook(_refuse_unsupported, with_kwargs=True)
        left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if left:
            raise InputError(f"model: found parameters that no rule of {family.model_type!r} covers: {', '.join(left)}")
        return model

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    def _linears(self, site: Site, layout: GridLayout) -> None:
        dense = [self.model.get_submodule(linear.name) for linear in site.linears]
        grids = GridLinear.siblings(dense, layout, self.mesh, site.name, self.source)
        for linear, grid in zip(site.linears, grids, strict=True):
            self._put(linear.name, grid)

    def _embedding(self, site: Site, layout: GridLayout) -> None:
        dense = self.model.get_submodule(site.name)
        # W [V,h] is cut along V, the site's K; as a linear's weight it would be [h,V].
        placements = weight_placements(GridLayout(n=layout.k), self.mesh)
        slices = local_slices(dense.weight.shape, self.mesh, placements)
        parameter = make_parameter(
            self.source(dense, "weight", slices), dense.weight.shape, self.mesh, placements, dense.weight.requires_grad
        )
        stored = StoredParameter(parameter, self.runtime, layout.m, site.name)
        product = Product.of(site.name, layout, self.mesh)
        self._put(site.name, VocabParallelEmbedding(stored, product, slices[0].start, dense.padding_idx))

    def _tie(self) -> None:
        embedding = self.model.get_submodule(self.family.embedding)
        head = self.model.get_submodule(self.family.head)
        if embedding.weight.placements != head.weight.placements:
            raise InputError(
                f"layouts: {self.family.head} and {self.family.embedding} share one weight, cut as "
                f"{head.weight.placements} and {embedding.weight.placements}; allowed: one cut of the vocabulary"
            )
        head.weight = embedding.weight
        head.site.weights[0] = embedding.stored

    def _norm(self, name: str, stream: tuple[str, ...]) -> None:
        dense = self.model.get_submodule(name)
        placements = [Replicate()] * self.mesh.ndim
        slices = local_slices(dense.weight.shape, self.mesh, placements)
        parameter = make_parameter(
            self.source(dense, "weight", slices), dense.weight.shape, self.mesh, placements, dense.weight.requires_grad
        )
        stored = StoredParameter(parameter, self.runtime, stream, name)
        self._put(name, GridRMSNorm(stored, dense.variance_epsilon))

    def _watch_block(self, block: nn.Module, first: bool) -> None:
        if first:
            block.register_forward_pre_hook(_take_tokens)
        attention_module = block.get_submodule(self.family.attention)
        column = next(module for module in attention_module.children() if isinstance(module, GridLinear))
        attention_module.register_forward_pre_hook(_Carry(column.site.product.gather_x.size), with_kwargs=True)
        for name in self.family.parents:
            parent = block.get_submodule(name)
            sites = {id(m.site): m.site for m in parent.children() if isinstance(m, GridLinear)}
            parent.register_forward_hook(_Clear(tuple(sites.values())), always_call=True)

    def _buffers(self) -> None:
        """Buffers are computed, not drawn: every rank holds them whole."""
        for module in self.model.modules():
            meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
            for name, buffer in meta.items():
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.mesh.device_type)
            if meta:
                self.model._init_weights(module)

    def _loss(self) -> None:
        layout = next(layout for site, layout in self.layouts.items() if site.name == self.family.head)
        self.model.loss_function = CausalLoss(VocabParallelLoss(self.mesh, layout.n, layout.m))


class CausalLoss:
    """Hugging Face's ``loss_function`` over this rank's logits."""

    def __init__(self, over_vocabulary: VocabParallelLoss):
        self.over_vocabulary = over_vocabulary

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """This rank's share of the mean loss. labels [B,S] name the tokens themselves, shift_labels the next ones."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        return self.over_vocabulary(logits, shift_labels, num_items_in_batch)


class _Carry:
    """Before attention: the tokens [1,T_local,h] go in as a carrier [B,S,h] of all T_local·n tokens."""

    def __init__(self, split: int):
        self.split = split

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = kwargs["hidden_states"]
        sequence = kwargs["position_embeddings"][0].shape[-2]
        batch = tokens.shape[-2] * self.split // sequence
        return args, {**kwargs, "hidden_states": carry(tokens, batch, sequence)}


class _Clear:
    """After attention or MLP, come what may: no sibling's result is kept."""

    def __init__(self, sites: tuple[Any, ...]):
        self.sites = sites

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for site in self.sites:
            site.clear()


def _take_tokens(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (tokens_of(args[0]), *args[1:])


def _refuse_unsupported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    allowed = "nothing in this version (pad on the right with labels of -100, and do not pack)"
    for name in ("attention_mask", "position_ids", "inputs_embeds", "cache", "past_key_values"):
        if kwargs.get(name) is not None:
            raise InputError(f"{name}: found a value; allowed: {allowed}")
    if len(args) > 1:
        raise InputError("forward: found positional arguments after input_ids; allowed: keyword arguments")
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, torch.Tensor) or keep:
        raise InputError("logits_to_keep: found a value; allowed: nothing, since tokens are split")
