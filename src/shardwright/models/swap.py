"""Swaps a model's modules for layers on the grid, as a plan's layouts say, and joins them where layouts differ.

The residual stream between sites is [1, T_local, h]. Model code that reads the shape [B,S,h] is shown a carrier
(reshard/carrier.py): from the embedding to the first block, where positions are built, and inside attention.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardwright.comm.groups import AxisGroup
from shardwright.errors import InputError
from shardwright.families.family import Family
from shardwright.layers import attention
from shardwright.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from shardwright.layers.loss import VocabParallelLoss
from shardwright.layers.norm import GridLayerNorm, GridRMSNorm
from shardwright.linear.grid_linear import GridLinear, sharding_of
from shardwright.linear.site_product import SiteProduct
from shardwright.models.buffers import fill_buffers
from shardwright.models.fits import param_group_finder
from shardwright.models.forward import (
    BeginForward,
    CarryIn,
    CarryOut,
    CausalLoss,
    Clear,
    EndForward,
    HiddenDropout,
    ScoreDropout,
    take_tokens,
)
from shardwright.models.structure import Structure
from shardwright.overlap.product import Product, names, weight_placements
from shardwright.params.store import ParameterStore
from shardwright.reshard.carrier import TokenShape
from shardwright.reshard.conversion import Conversion
from shardwright.reshard.head_exchange import HeadExchange, HeadGather
from shardwright.runtime.runtime import Runtime
from shardwright.spec.edge import edges
from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import chunk
from shardwright.spec.plan import Plan
from shardwright.spec.sharding import Sharding
from shardwright.spec.site import Linear, Site, exchanged_axes, gathers_heads, held_heads
from shardwright.values.initial import Source
from shardwright.values.random import key_of


class Swap:
    """The steps of ``parallelize``, over one model."""

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        runtime: Runtime,
        family: Family,
        layouts: Mapping[Site, GridLayout],
        source: Source,
        plan: Plan,
    ):
        self.model, self.mesh, self.runtime, self.family = model, mesh, runtime, family
        self.layouts, self.source, self.seed, self.plan = layouts, source, plan.seed, plan
        self.layout_of = {site.name: layout for site, layout in layouts.items()}
        self.store = ParameterStore(mesh, self._sharding_of, param_group_finder(family, layouts), plan.in_flight)
        self.sites: dict[str, SiteProduct] = {}
        self.shape = TokenShape()
        stream = next(iter(layouts.values()))
        self.stream = stream.output_token_axes
        self.stream_features = runtime.group(stream.output_feature_axes)
        self.split = self._within_batch(self.stream)
        data = runtime.group(plan.batch_axes)
        self.first_sequence, _ = chunk(plan.micro_batch, data.size, data.index)

    def run(self) -> Any:
        family, model = self.family, self.model
        for site, layout in self.layouts.items():
            if site.name == family.embedding:
                self._embedding(site, layout)
            else:
                self._linears(site, layout)
        self._convert()
        if getattr(model.config, "tie_word_embeddings", False):
            self._tie()
        if family.positions is not None:
            self._positions(family.positions)
        for index, block in enumerate(model.get_submodule(family.blocks)):
            self._block(f"{family.blocks}.{index}", block, first=index == 0)
        self._norm(family.final_norm, self.stream, self.stream_features)
        for name in family.dropouts:
            self._dropout(name)
        fill_buffers(model, torch.device(self.mesh.device_type), self.seed, self.source)
        self._loss()
        model.config.use_cache = False
        model.config._attn_implementation = attention.register()
        model.register_forward_pre_hook(BeginForward(self.shape, self.sites[family.head]), with_kwargs=True)
        model.get_submodule(family.final_norm).register_forward_hook(CarryOut(self.shape))
        model.parameter_store = self.store
        self.store.watch_layers(model)
        self.store.let_ranks_agree(gathers=False)  # ranks run one model's code: they ask for the same parameter groups
        model.register_forward_pre_hook(self.store.begin_forward)
        model.register_forward_hook(EndForward(self.store.schedule), always_call=True)
        Structure(model)
        return model

    def _sharding_of(self, param_group: str) -> Sharding:
        layout = self.layout_of.get(param_group)
        if layout is not None and layout.axes_where("w", "sharded"):
            return sharding_of(layout)
        return self.plan.sharding_for(param_group)

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    def _within_batch(self, axes: tuple[str, ...]) -> AxisGroup:
        """Those of ``axes`` that do not split the batch: over them, B·S tokens are split."""
        return self.runtime.group(tuple(axis for axis in axes if axis not in self.plan.batch_axes))

    def _stored(self, module: nn.Module, name: str, placements: Any, partial: tuple[str, ...], owner: str) -> Any:
        """(the stored parameter, what this rank uses of it) of ``module.name``; (None, None) where there is none."""
        if getattr(module, name) is None:
            return None, None
        return self.store.place(self.source, module, name, f"{owner}.{name}", placements, partial, owner)

    def _split(self, dim: int, axes: tuple[str, ...]) -> list[Placement]:
        """One dimension split by these axes."""
        return [Shard(dim) if axis in axes else Replicate() for axis in names(self.mesh)]

    def _linears(self, site: Site, layout: GridLayout) -> None:
        dense = [self.model.get_submodule(linear.name) for linear in site.linears]
        grids = GridLinear.siblings(dense, layout, self.mesh, site.name, self.source, site.linears, self.store)
        for linear, grid in zip(site.linears, grids, strict=True):
            self._put(linear.name, grid)
        self.sites[site.name] = grids[0].site
        grids[0].site.sequences = self._within_batch(layout.m)

    def _convert(self) -> None:
        """Puts conversions onto the edges where layouts differ."""
        inputs, outputs = edges(list(self.layouts), self.layout_of, self.plan.batch_axes, self.plan.mesh)
        for site in self.layouts:
            if site.name in inputs:
                self.sites[site.name].before = Conversion(inputs[site.name], self.runtime, site.k, site.name)
            if site.name in outputs:
                self.sites[site.name].after = Conversion(outputs[site.name], self.runtime, site.n, site.name)

    def _embedding(self, site: Site, layout: GridLayout) -> None:
        dense = self.model.get_submodule(site.name)
        # W [V,h] is cut along V, the site's K, and along h, its N; as a linear's weight it would be [h,V].
        placements = weight_placements(GridLayout(n=layout.k, k=layout.n), self.mesh)
        stored, cut = self._stored(dense, "weight", placements, layout.m, site.name)
        scale = getattr(dense, "scalar_embed_scale", None)
        if scale is not None:  # rounded as Hugging Face rounds it in a model of the products' element type
            of_products = getattr(torch, self.plan.dtype)
            scale = torch.tensor(scale, dtype=dense.embed_scale.dtype, device="cpu").to(of_products).item()
        product, first = Product.of(site.name, layout, self.mesh), cut.ranges[0][0][0]
        sequences = self._within_batch(layout.m)
        self._put(
            site.name, VocabParallelEmbedding(stored, product, first, dense.padding_idx, scale, sequences=sequences)
        )

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

    def _positions(self, name: str) -> None:
        dense = self.model.get_submodule(name)
        stored, _ = self._stored(dense, "weight", self._split(1, self.stream_features.axes), self.stream, name)
        self._put(name, PositionEmbedding(stored, self.split, self.shape))

    def _norm(self, name: str, partial: tuple[str, ...], split: AxisGroup | None = None) -> None:
        """partial: axes that split the rows. split: the ranks that split the features."""
        dense = self.model.get_submodule(name)
        placements = self._split(0, split.axes if split is not None else ())
        weight, _ = self._stored(dense, "weight", placements, partial, name)
        if isinstance(dense, nn.LayerNorm):
            bias, _ = self._stored(dense, "bias", placements, partial, name)
            self._put(name, GridLayerNorm(weight, bias, dense.eps, split))
        else:
            eps = getattr(dense, "variance_epsilon", None) or dense.eps
            self._put(name, GridRMSNorm(weight, eps, self.family.norm_from_one, split))

    def _dropout(self, name: str) -> None:
        probability = self.model.get_submodule(name).p
        if probability:
            self._put(name, HiddenDropout(probability, key_of(self.seed, name), self._hidden_place))

    def _hidden_place(self, tokens: torch.Tensor) -> tuple[int, int, int]:
        """(first token over the whole mesh, first feature, features) of hidden states [.., T_local, h]."""
        own = self.shape.batch * self.shape.sequence
        before = self.first_sequence * self.shape.sequence
        width = self.model.config.hidden_size
        return before + self.split.bounds(own)[0], self.stream_features.bounds(width)[0], width

    def _block(self, name: str, block: nn.Module, first: bool) -> None:
        family = self.family
        for norm in family.block_norms:
            self._norm(f"{name}.{norm}", self.stream, self.stream_features)
        sites = [site for key, site in self.sites.items() if key.startswith(f"{name}.")]
        heads = self.layout_of[f"{name}.{family.attention}.qkv"]
        for norm in family.head_norms:
            self._norm(f"{name}.{norm}", heads.output_token_axes + heads.n)
        for dropout in family.block_dropouts:
            self._dropout(f"{name}.{dropout}")
        module: Any = block.get_submodule(family.attention)
        split = self.runtime.group(heads.output_feature_axes)
        exchanged = self.runtime.group(exchanged_axes(heads, self.plan.batch_axes))
        self._exchange_heads(f"{name}.{family.attention}", exchanged, split.size)
        for count in family.head_counts:
            setattr(module, count, getattr(module, count) // split.size)
        probability = getattr(self.model.config, family.attention_dropout, 0.0)
        if probability:
            total = self.model.config.num_attention_heads
            held = total // split.size
            place = (self.first_sequence, split.index * held + exchanged.bounds(held)[0], total)
            module.score_dropout = ScoreDropout(probability, key_of(self.seed, f"{name}.{family.attention}"), place)
        if first:
            block.register_forward_pre_hook(take_tokens)
        if self.plan.recompute_for(name) == "block":
            recomputed: Any = block
            recomputed.gradient_checkpointing = True
            recomputed._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        module.register_forward_pre_hook(CarryIn(self.shape, sites), with_kwargs=True)
        for parent in family.parents:
            inside = [site for key, site in self.sites.items() if key.startswith(f"{name}.{parent}.")]
            block.get_submodule(parent).register_forward_hook(Clear(inside), always_call=True)

    def _exchange_heads(self, attention: str, group: AxisGroup, over: int) -> None:
        """Where tokens are split as they leave q, k, v: whole sequences of fewer heads in between.

        group: the ranks that split tokens. over: how many split heads for good.
        """
        if group.size == 1:
            return

        qkv, out = (next(s for s in self.layouts if s.name == f"{attention}.{name}") for name in ("qkv", "o"))
        queries = held_heads(qkv.linears[0], over)

        def exchange(linear: Linear) -> HeadExchange | HeadGather:
            held = held_heads(linear, over)
            if gathers_heads(linear, queries, over, group.size):
                return HeadGather(group, linear.unit, held, queries, qkv.name)
            return HeadExchange(group, linear.unit, held, qkv.name)

        for linear in qkv.linears:
            self.model.get_submodule(linear.name).exchange = exchange(linear)
        for linear in out.linears:
            self.model.get_submodule(linear.name).exchange = HeadExchange(group, out.k_unit, queries, out.name)

    def _loss(self) -> None:
        layout = self.layout_of[self.family.head]
        batch, split = self.plan.batch_axes, self._within_batch(layout.output_token_axes)
        loss = VocabParallelLoss(self.mesh, layout.output_feature_axes, batch, split.axes)
        self.model.loss_function = CausalLoss(loss)
        self.model.register_forward_hook(self.model.loss_function.check, with_kwargs=True, always_call=True)
