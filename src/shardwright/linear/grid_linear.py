"""GridLinear: an nn.Linear whose product lies on a mesh as a GridLayout says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardwright._errors import InputError
from shardwright.layout import GridLayout
from shardwright.linear.carrier import tokens_of
from shardwright.linear.product import Product, activation_placements, bias_placements, weight_placements
from shardwright.linear.site_product import SiteProduct
from shardwright.params import StoredParameter, cut, local_slices, make_parameter

Materialise = Callable[[nn.Module, str, tuple[slice, ...]], torch.Tensor]
"""(dense module, parameter name, this rank's slices) → the shard's values."""


class GridLinear(nn.Linear):
    """Y[M,N] = X[M,K] · W[N,K]ᵀ + b[N] on a mesh. Made by ``from_dense`` or ``siblings``.

    Takes plain local tensors [M_local,K_local] or [1,M_local,K_local] and gives Y with as many dimensions; other
    leading sizes are flattened first and give [1,M_local,N_local]. ``weight`` and ``bias`` are DTensor parameters, and
    so are their gradients, which are sums (never means) and complete when backward returns.
    """

    weight: nn.Parameter
    site: SiteProduct
    index: int
    layout: GridLayout
    mesh: DeviceMesh

    @classmethod
    def from_dense(cls, linear: nn.Linear, layout: GridLayout, mesh: DeviceMesh, name: str = "linear") -> GridLinear:
        """The grid form of ``linear``. Every rank holds the dense one (equal on all) and takes its part.

        Raises InputError where the layout does not fit the mesh or the sizes do not divide.
        """
        return cls.siblings([linear], layout, mesh, name)[0]

    @classmethod
    def siblings(
        cls,
        linears: Sequence[nn.Linear],
        layout: GridLayout,
        mesh: DeviceMesh,
        name: str = "site",
        materialise: Materialise | None = None,
    ) -> list[GridLinear]:
        """The grid forms of linears that all take the same X: one gather, one saved shard, one reduction of dX.

        Call each of them with the same tensor object. materialise: where shards come from; by default cut from the
        dense weights.
        """
        product = Product.of(name, layout, mesh)
        grids = [cls._shell(linear, layout, mesh, materialise) for linear in linears]
        weight_axes, bias_axes = layout.m, layout.m if not layout.k else layout.output_token_axes
        runtime = product.runtime
        weights = [StoredParameter(grid.weight, runtime, weight_axes, name) for grid in grids]
        biases: list[StoredParameter | None] = [
            StoredParameter(grid.bias, runtime, bias_axes, name) if grid.bias is not None else None for grid in grids
        ]
        site = SiteProduct(product, weights, biases)
        for index, grid in enumerate(grids):
            grid.site, grid.index = site, index
        return grids

    @classmethod
    def _shell(
        cls, linear: nn.Linear, layout: GridLayout, mesh: DeviceMesh, materialise: Materialise | None
    ) -> GridLinear:
        n, k = linear.weight.shape
        runtime = Product.of("linear", layout, mesh).runtime
        for what, count, axes in (("out_features", n, layout.n), ("in_features", k, layout.k)):
            ranks = runtime.group(axes).size
            if count % ranks:
                raise InputError(f"{what}: found {count}; allowed: a multiple of {'×'.join(axes)} = {ranks}")
        grid = cls.__new__(cls)
        nn.Module.__init__(grid)
        grid.in_features, grid.out_features, grid.layout, grid.mesh = k, n, layout, mesh
        for name, placements in (
            ("weight", weight_placements(layout, mesh)),
            ("bias", bias_placements(layout, mesh)),
        ):
            dense = getattr(linear, name)
            if dense is None:
                grid.register_parameter(name, None)
                continue
            if materialise is None:
                local = cut(dense, mesh, placements)
            else:
                local = materialise(linear, name, local_slices(dense.shape, mesh, placements))
            grid.register_parameter(name, make_parameter(local, dense.shape, mesh, placements, dense.requires_grad))
        grid.train(linear.training)
        return grid

    @property
    def input_placements(self) -> tuple[Placement, ...]:
        """DTensor placements of X, one a mesh axis in mesh order; dimensions count from the end."""
        return activation_placements(self.layout.input_token_axes, self.layout.k, self.mesh)

    @property
    def output_placements(self) -> tuple[Placement, ...]:
        """DTensor placements of Y, one a mesh axis in mesh order; dimensions count from the end."""
        return activation_placements(self.layout.output_token_axes, self.layout.n, self.mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [.., M_local, K_local] (or a carrier of it) → Y [.., M_local', N_local]."""
        tokens = tokens_of(x)
        width = self.weight_width
        if tokens.shape[-1] != width:
            raise InputError(
                f"{self.site.product.name}: found an input of {tokens.shape[-1]} features; allowed: {width} "
                f"(the local part of in_features = {self.in_features})"
            )
        rows = tokens if tokens.dim() == 2 else tokens.reshape(-1, width)
        y = self.site(x, rows, self.index)
        return y if tokens.dim() == 2 else y.unsqueeze(0)

    @property
    def weight_width(self) -> int:
        """K_local: the input features that this rank's weight takes."""
        return self.site.weights[self.index].lease().shape[1]

    def extra_repr(self) -> str:
        """The dense sizes and the layout."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.layout}"
