"""Norms on tokens and features that may be split. Statistics are taken in at least fp32.

| pass     | in       | out                                                                                |
|----------|----------|------------------------------------------------------------------------------------|
| forward  | x [R,h]  | RMS: y = w · x̂, x̂ = x · r, r = (mean x² + ε)^−½ [R,1]; saves x itself and r         |
|          |          | LayerNorm: y = w · x̂ + b, x̂ = (x − mean) · r; saves x itself, mean and r           |
| backward | dy [R,h] | RMS: g = dy · w; dx = r (g − x̂ · mean(g x̂)); dw = Σ_rows dy x̂                      |
|          |          | LayerNorm: torch's own kernel                                                      |

dw (and db) are partial over the axes that split the rows, and summed over them once.

Features that are split over a group, h' of them here (e bytes a number of at least fp32, R rows):

| norm      | forward: one small collective                        | backward: one all-reduce            |
|-----------|------------------------------------------------------|-------------------------------------|
| RMS       | all-reduce of Σ x² [R,1]                             | Σ g x̂ [R,1]                         |
| LayerNorm | all-gather of pivot, residual mean and Σ of squares [3,R] | Σ g and Σ g x̂ [2,R]            |

A pivot is a row's first number here; what is summed up is x minus its pivot, so nothing is lost where the mean is large
beside the deviation. (T. Chan, G. Golub, R. LeVeque, 1983, tell how parts of a variance are combined.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from shardwright.comm.collectives import all_gather, all_reduce
from shardwright.comm.groups import AxisGroup
from shardwright.params.parameter_group import Use
from shardwright.params.stored import StoredParameter


@dataclass(frozen=True)
class Features:
    """The features of a row: how many there are in all, and the group over which they are split."""

    count: int
    group: AxisGroup


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        parameter: Any,
        stored: StoredParameter,
        use: Use | None,
        eps: float,
        from_one: bool,
        features: Features,
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        all_reduce(square, features.group, stored.name)
        inverse = (square / features.count + eps).rsqrt()
        weight = stored.lease()
        ctx.stored, ctx.use, ctx.from_one, ctx.features = stored, use, from_one, features
        ctx.save_for_backward(x, inverse)
        unit = x * inverse
        if from_one:  # Gemma's rule: the product in wide precision, then the rounding
            return cast(torch.Tensor, unit.mul_(weight.to(wide) + 1).to(x.dtype))
        return cast(torch.Tensor, unit.to(x.dtype).mul_(weight))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        x, inverse = ctx.saved_tensors
        weight = ctx.stored.lease(ctx.use)
        unit = x * inverse
        if ctx.needs_input_grad[1]:
            ctx.stored.deposit((dy * unit).flatten(0, -2).sum(0).to(weight.dtype))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy * (weight.to(inverse.dtype) + 1 if ctx.from_one else weight.to(inverse.dtype))
            along = (dx * unit).sum(-1, keepdim=True)
            all_reduce(along, ctx.features.group, ctx.stored.name)
            dx.sub_(unit.mul_(along.div_(ctx.features.count))).mul_(inverse)
            dx = dx.to(x.dtype)
        ctx.stored.finish(ctx.use)
        return (dx,) + (None,) * 6


@dataclass(frozen=True)
class _Affine:
    """The weight and bias of one LayerNorm call, and the uses that announce its backward."""

    weight: StoredParameter
    bias: StoredParameter | None
    of_weight: Use | None
    of_bias: Use | None

    def finish(self) -> None:
        """Ends both uses: this backward reads neither again."""
        self.weight.finish(self.of_weight)
        if self.bias is not None:
            self.bias.finish(self.of_bias)


class _LayerNormalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        bias: Any,
        affine: _Affine,
        eps: float,
    ) -> torch.Tensor:
        w, b = affine.weight.lease(), affine.bias.lease() if affine.bias is not None else None
        y, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], w, b, eps)
        ctx.affine = affine
        ctx.save_for_backward(x, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, mean, inverse = ctx.saved_tensors
        affine: _Affine = ctx.affine
        weight, bias = affine.weight, affine.bias
        w, b = weight.lease(affine.of_weight), bias.lease(affine.of_bias) if bias is not None else None
        wanted = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[2] and b is not None)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            grads[0].contiguous(), x, x.shape[-1:], mean, inverse, w, b, wanted
        )
        if wanted[1]:
            weight.deposit(dw)
        if wanted[2] and bias is not None:
            bias.deposit(db)
        affine.finish()
        return (dx,) + (None,) * 4


class _SplitLayerNormalise(torch.autograd.Function):
    """LayerNorm of rows whose features are split: x̂ = ((x − pivot) − mean) · r, mean being that of x − pivot.

    pivot is the first rank's of the group. Saves x itself, pivot, mean and r [R,1].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        bias: Any,
        affine: _Affine,
        eps: float,
        features: Features,
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        pivot, mean, inverse = _statistics(x.to(wide), eps, features, affine.weight.name)
        ctx.affine, ctx.features = affine, features
        ctx.save_for_backward(x, pivot, mean, inverse)
        y = x.sub(pivot).sub_(mean).mul_(inverse)
        y = y.to(x.dtype).mul_(affine.weight.lease())
        return y if affine.bias is None else y.add_(affine.bias.lease())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        x, pivot, mean, inverse = ctx.saved_tensors
        affine: _Affine = ctx.affine
        weight, bias = affine.weight, affine.bias
        unit = x.sub(pivot).sub_(mean).mul_(inverse)
        if ctx.needs_input_grad[1]:
            weight.deposit((dy * unit).flatten(0, -2).sum(0).to(weight.dtype))
        if ctx.needs_input_grad[2] and bias is not None:
            bias.deposit(dy.flatten(0, -2).sum(0))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy * weight.lease(affine.of_weight).to(inverse.dtype)
            sums = torch.stack([dx.sum(-1, keepdim=True), (dx * unit).sum(-1, keepdim=True)])
            all_reduce(sums, ctx.features.group, weight.name)
            sums.div_(ctx.features.count)
            dx = dx.sub_(sums[0]).sub_(unit.mul_(sums[1])).mul_(inverse).to(x.dtype)
        affine.finish()
        return (dx,) + (None,) * 5


def _statistics(
    x: torch.Tensor, eps: float, features: Features, owner: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pivot, mean of x − pivot, (var + ε)^−½), each [.., 1], over all features; x [.., h'] of at least fp32."""
    group = features.group
    counts = [stop - start for start, stop in (group.bounds(features.count, rank) for rank in range(group.size))]
    mine = x.new_zeros(3, *x.shape[:-1], 1)  # pivot, residual mean, sum of squares of this part
    if x.shape[-1]:
        mine[0] = x[..., :1]
        residual = x - mine[0]
        mine[1] = residual.mean(-1, keepdim=True)
        mine[2] = residual.sub_(mine[1]).square_().sum(-1, keepdim=True)
        del residual
    every = mine.new_empty(group.size, *mine.shape)
    all_gather(mine.unsqueeze(0), every, group, owner)
    pivot = every[0, 0]
    shares = x.new_tensor(counts).view(-1, *(1,) * x.dim()) / features.count
    means = every[:, 0] - pivot + every[:, 1]  # of each part, from the one pivot
    mean = (means * shares).sum(0)
    variance = every[:, 2].sum(0) / features.count + ((means - mean).square() * shares).sum(0)
    return pivot.clone(), mean, (variance + eps).rsqrt()


class GridRMSNorm(nn.Module):
    """RMSNorm with a DTensor weight, cut as the features of its rows are.

    x [.., h'] → [.., h']. from_one: the weight counts from one (y = x̂ · (1 + w)), as Gemma's does. The weight's
    gradient is summed over ``stored.partial_axes``, the axes that split the rows. split: the group over which features
    are split; none by default.
    """

    def __init__(self, stored: StoredParameter, eps: float, from_one: bool = False, split: AxisGroup | None = None):
        super().__init__()
        self.features = _features_of(stored, split)
        self.weight = stored.parameter
        self.stored = stored
        self.eps = eps
        self.from_one = from_one

    def stored_parameters(self) -> list[StoredParameter]:
        """How the parameters are stored."""
        return [self.stored]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] → w · x / sqrt(mean x² + ε), in x's dtype."""
        y: torch.Tensor = _Normalise.apply(
            x, self.stored.anchor, self.stored, self.stored.use(x.requires_grad), self.eps, self.from_one, self.features
        )
        return y


class GridLayerNorm(nn.Module):
    """LayerNorm with DTensor weight and bias, cut as the features of its rows are. x [.., h'] → [.., h'].

    split: the group over which features are split; none by default.
    """

    def __init__(
        self, weight: StoredParameter, bias: StoredParameter | None, eps: float, split: AxisGroup | None = None
    ):
        super().__init__()
        self.features = _features_of(weight, split)
        self.weight = weight.parameter
        self.register_parameter("bias", bias.parameter if bias is not None else None)
        self.stored = (weight, bias)
        self.eps = eps

    def stored_parameters(self) -> list[StoredParameter]:
        """How the parameters are stored."""
        return [stored for stored in self.stored if stored is not None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] → w · (x − mean) / sqrt(var + ε) + b, in x's dtype."""
        weight, bias = self.stored
        of_weight = weight.use(x.requires_grad)
        of_bias = bias.use(x.requires_grad) if bias is not None else None
        affine = _Affine(weight, bias, of_weight, of_bias)
        anchors = weight.anchor, bias.anchor if bias is not None else None
        if self.features.group.size > 1:
            inputs = (x, *anchors, affine, self.eps, self.features)
            split: torch.Tensor = _SplitLayerNormalise.apply(*inputs)
            return split
        y: torch.Tensor = _LayerNormalise.apply(x.contiguous(), *anchors, affine, self.eps)
        return y


def _features_of(stored: StoredParameter, split: AxisGroup | None) -> Features:
    return Features(stored.parameter.shape[0], split if split is not None else stored.runtime.group(()))
