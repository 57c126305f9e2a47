"""Norms on tokens that may be split, with whole features. Statistics are taken in at least fp32.

| pass     | in       | out                                                                                |
|----------|----------|------------------------------------------------------------------------------------|
| forward  | x [R,h]  | RMS: y = w · x̂, x̂ = x · r, r = (mean x² + ε)^−½ [R,1]; saves x itself and r         |
|          |          | LayerNorm: y = w · x̂ + b, x̂ = (x − mean) · r; saves x itself, mean and r           |
| backward | dy [R,h] | RMS: g = dy · w; dx = r (g − x̂ · mean(g x̂)); dw = Σ_rows dy x̂                      |
|          |          | LayerNorm: torch's own kernel                                                      |

dw (and db) are partial over the axes that split the rows, and summed over them once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from shardwright.params import StoredParameter, Use


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
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = (length.square() / x.shape[-1] + eps).rsqrt()
        weight = stored.lease()
        ctx.stored, ctx.use, ctx.from_one = stored, use, from_one
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
            along = (dx * unit).mean(-1, keepdim=True)
            dx.sub_(unit.mul_(along)).mul_(inverse)
            dx = dx.to(x.dtype)
        ctx.stored.finish(ctx.use)
        return dx, None, None, None, None, None


class _LayerNormalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        bias: Any,
        stored: tuple[StoredParameter, StoredParameter | None],
        uses: tuple[Use | None, Use | None],
        eps: float,
    ) -> torch.Tensor:
        w, b = stored[0].lease(), stored[1].lease() if stored[1] is not None else None
        y, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], w, b, eps)
        ctx.stored, ctx.uses = stored, uses
        ctx.save_for_backward(x, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, mean, inverse = ctx.saved_tensors
        (weight, bias), (of_weight, of_bias) = ctx.stored, ctx.uses
        w, b = weight.lease(of_weight), bias.lease(of_bias) if bias is not None else None
        wanted = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[2] and b is not None)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            grads[0].contiguous(), x, x.shape[-1:], mean, inverse, w, b, wanted
        )
        if wanted[1]:
            weight.deposit(dw)
        if wanted[2]:
            bias.deposit(db)
        weight.finish(of_weight)
        if bias is not None:
            bias.finish(of_bias)
        return dx, None, None, None, None, None


class GridRMSNorm(nn.Module):
    """RMSNorm with a DTensor weight, whole on every rank.

    x [.., h] → [.., h]. from_one: the weight counts from one (y = x̂ · (1 + w)), as Gemma's does. The weight's gradient
    is summed over ``stored.partial_axes``, the axes that split the rows.
    """

    def __init__(self, stored: StoredParameter, eps: float, from_one: bool = False):
        super().__init__()
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
            x, self.weight, self.stored, self.stored.use(x.requires_grad), self.eps, self.from_one
        )
        return y


class GridLayerNorm(nn.Module):
    """LayerNorm with DTensor weight and bias, whole on every rank. x [.., h] → [.., h]."""

    def __init__(self, weight: StoredParameter, bias: StoredParameter | None, eps: float):
        super().__init__()
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
        uses = (weight.use(x.requires_grad), bias.use(x.requires_grad) if bias is not None else None)
        y: torch.Tensor = _LayerNormalise.apply(x.contiguous(), self.weight, self.bias, self.stored, uses, self.eps)
        return y
