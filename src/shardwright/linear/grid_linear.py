"""GridLinear: a linear layer whose product lies on a mesh as a GridLayout says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardwright.errors import InputError
from shardwright.linear.site_product import SiteProduct
from shardwright.overlap.product import Product, activation_placements, bias_placements, weight_placements
from shardwright.params.store import ParameterStore
from shardwright.params.stored import StoredParameter
from shardwright.reshard.carrier import Carrier, tokens_of
from shardwright.reshard.head_exchange import HeadExchange, HeadGather
from shardwright.spec.layout import GridLayout
from shardwright.spec.sharding import Sharding
from shardwright.spec.site import Linear
from shardwright.values.initial import Source, from_values


class GridLinear(nn.Linear):
    """Y[M,N] = X[M,K] · W[N,K]ᵀ + b[N] on a mesh. Made by ``from_dense`` or ``siblings``.

    Takes plain local tensors [M_local,K_local] or [1,M_local,K_local] and gives Y with as many dimensions; other
    leading sizes are flattened first and give [1,M_local,N_local]; a carrier [B,S,K] gives [B,S,N_local] where Y is
    whole along M, [1,M_local,N_local] where it is scattered. ``weight`` and ``bias`` are DTensor parameters, and so are
    their gradients, which are sums (never means) and complete when backward returns.

    exchange: the tokens of Y that this rank has (of q, k or v) are exchanged for heads after the product, and heads for
    tokens of X (of the site behind attention) before it.
    """

    weight: nn.Parameter
    site: SiteProduct
    index: int
    exchange: HeadExchange | HeadGather | None = None
    layout: GridLayout
    mesh: DeviceMesh

    @classmethod
    def from_dense(cls, linear: nn.Module, layout: GridLayout, mesh: DeviceMesh, name: str = "linear") -> GridLinear:
        """The grid form of ``linear``. Every rank holds the dense one (equal on all) and takes its part.

        linear: an nn.Linear, or a module like it whose weight is stored as [K,N] (Hugging Face's Conv1D).
        Raises InputError where the layout does not fit the mesh.
        """
        return cls.siblings([linear], layout, mesh, name)[0]

    @classmethod
    def siblings(
        cls,
        linears: Sequence[nn.Module],
        layout: GridLayout,
        mesh: DeviceMesh,
        name: str = "site",
        source: Source = from_values,
        facts: Sequence[Linear] | None = None,
        store: ParameterStore | None = None,
    ) -> list[GridLinear]:
        """The grid forms of linears that all take the same X: one gather, one saved shard, one reduction of dX.

        Call each of them with the same tensor object. source: where shards come from; by default cut from the dense
        weights. facts: what must stay together when N is split (heads, fused parts), one a linear. store: where the
        parameters are stored; by default the site is a parameter group of its own, stored as the layout's ``w`` says.
        """
        product = Product.of(name, layout, mesh)
        transposed = not isinstance(linears[0], nn.Linear)
        shapes = [cast(torch.Tensor, linear.weight).shape for linear in linears]
        sizes = [tuple(shape[::-1] if transposed else shape) for shape in shapes]
        facts = facts or [Linear(f"{name}.{index}", n) for index, (n, _) in enumerate(sizes)]
        store = store or _store_of_one(mesh, layout, name)
        grids, weights, biases = [], list[StoredParameter](), list[StoredParameter | None]()
        for index, (linear, fact) in enumerate(zip(linears, facts, strict=True)):
            grid = cls.__new__(cls)
            nn.Module.__init__(grid)
            grid.index, grid.layout, grid.mesh = index, layout, mesh
            grid.out_features, grid.in_features = sizes[index]
            weight, bias = _store(grid, linear, fact, product, store, source, transposed)
            weights.append(weight)
            biases.append(bias)
            grid.train(linear.training)
            grids.append(grid)
        site = SiteProduct(product, weights, biases, transposed)
        for grid in grids:
            grid.site = site
        return grids

    @property
    def input_placements(self) -> tuple[Placement, ...]:
        """DTensor placements of X, one a mesh axis in mesh order; dimensions count from the end."""
        return activation_placements(self.layout.input_token_axes, self.layout.input_feature_axes, self.mesh)

    @property
    def output_placements(self) -> tuple[Placement, ...]:
        """DTensor placements of Y, one a mesh axis in mesh order; dimensions count from the end."""
        return activation_placements(self.layout.output_token_axes, self.layout.output_feature_axes, self.mesh)

    def forward(self, x: torch.Tensor | Carrier, tokens: int | None = None) -> torch.Tensor:
        """X [.., M_local, K_local] (or a carrier of it) → Y [.., M_local', N_local].

        tokens: the rows of X over the axes that split it beside m, needed where they do not divide (4 + 3 over two
        ranks is 7); by default every rank holds as many as this one (linear/rows.py: InputError where one does not).
        """
        local = tokens_of(x)
        product = self.site.product
        _, width = product.shape_in(0, self.site.width)
        if isinstance(self.exchange, HeadExchange) and not isinstance(x, Carrier):
            return self._from_heads(self.exchange, x)
        if local.shape[-1] != width and self.site.before is None:
            raise InputError(
                f"{product.name}: found an input of {local.shape[-1]} features; allowed: {width} "
                f"(the local part of in_features = {self.in_features})"
            )
        rows = local if local.dim() == 2 else local.flatten(0, -2)
        if isinstance(x, Carrier):
            tokens = self.site.rows_of(x.rows)
        elif tokens is None:
            if not self.site.tokens and not torch.compiler.is_compiling():
                self.site.rows_agree.check(rows.shape[0])
            parts = 1 if product.x_by_features else product.gather_x.size
            tokens = self.site.rows_of(self.site.tokens) if self.site.tokens else rows.shape[0] * parts
        y = self.site(local, rows, tokens, self.index)
        if isinstance(x, Carrier) and self.exchange is not None:
            y = self.exchange.to_heads(y, x.rows)
        if isinstance(x, Carrier) and y.shape[0] == x.rows:
            return y.view(*x.shape[:2], -1)
        return y if local.dim() == 2 else y.unsqueeze(0)

    def _from_heads(self, exchange: HeadExchange, x: torch.Tensor) -> torch.Tensor:
        """x [B,S,·] of whole sequences, some heads → Y [1,M_local,N_local]."""
        rows = x.flatten(0, -2)
        mine = exchange.to_tokens(rows)
        return self.site(mine, mine, self.site.rows_of(rows.shape[0]), self.index).unsqueeze(0)

    def stored_parameters(self) -> list[StoredParameter]:
        """How the parameters are stored."""
        site = self.site
        both = (site.weights[self.index], (site.inner_biases[self.index] or site.outer_biases[self.index]))
        return [stored for stored in both if stored is not None]

    def extra_repr(self) -> str:
        """The dense sizes and the layout."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.layout}"


def _store(
    grid: GridLinear,
    linear: nn.Module,
    fact: Linear,
    product: Product,
    store: ParameterStore,
    source: Source,
    transposed: bool,
) -> tuple[StoredParameter, StoredParameter | None]:
    """Gives ``grid`` its parameters, cut from ``linear``, and returns how they are stored.

    Gradients of W are partial over m; those of b too, and over the k axes that scatter the rows to which b is added. W
    is stored over its m axes as the layout's ``w`` says; b whole, since it is small: one reduction, no gather.
    Units that several ranks share (key/value heads, fewer than the ranks) are stored by each rank that reads them, and
    their gradients are partial over those copies too.
    """
    layout, runtime, mesh = product.layout, product.runtime, store.mesh
    split = runtime.group(layout.n)
    held, copies = layout, tuple[str, ...]()
    if fact.sharable and split.size > 1 and fact.units % split.size != 0:
        if split.size % fact.units or layout.output_feature_axes != layout.n:
            raise InputError(
                f"{fact.name}: found {fact.units} units (heads) over {split.size} ranks; allowed: a multiple of the "
                "ranks, or, with y: sharded or replicated, a divisor of them"
            )
        if fact.units == 1:
            held, copies = GridLayout(m=layout.m, k=layout.k), layout.n
        else:
            mesh, parts, copy = runtime.unflattened_mesh(layout.n, fact.units)
            held, copies = GridLayout(m=layout.m, n=(parts,), k=layout.k), (copy,)
    groups = fact.groups if split.size > 1 else 1
    found: list[StoredParameter | None] = []
    for name, placements, partial in (
        ("weight", weight_placements(held, mesh, transposed, groups), layout.m + copies),
        ("bias", bias_placements(held, mesh, groups), (layout.output_token_axes if layout.k else layout.m) + copies),
    ):
        if getattr(linear, name) is None:
            grid.register_parameter(name, None)
            found.append(None)
            continue
        stored, _ = store.place(source, linear, name, f"{fact.name}.{name}", placements, partial, product.name, mesh)
        grid.register_parameter(name, stored.parameter)
        found.append(stored)
    weight, bias = found
    assert weight is not None
    return weight, bias


def _store_of_one(mesh: DeviceMesh, layout: GridLayout, name: str) -> ParameterStore:
    """A site's weights as one parameter group; its biases stay whole, as another, where storage is split."""
    if not layout.axes_where("w", "sharded"):
        return ParameterStore(mesh, group_of=lambda _: name)
    biases = f"{name}.biases"
    return ParameterStore(
        mesh,
        lambda name: Sharding() if name == biases else sharding_of(layout),
        lambda parameter: biases if parameter.endswith(".bias") else name,
    )


def sharding_of(layout: GridLayout) -> Sharding:
    """How W is stored over its missing role, as the layout says: gathered before use where it is sharded."""
    axes = layout.axes_where("w", "sharded")
    return Sharding("parameters", axes, keep=layout.save_w == "gathered") if axes else Sharding()
