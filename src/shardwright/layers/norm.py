"""RMSNorm on tokens that may be split, with whole features.

| pass     | in       | out                                                                   |
|----------|----------|-----------------------------------------------------------------------|
| forward  | x [R,h]  | y = w · x̂, x̂ = x · r, r = (mean x² + ε)^−½ [R,1]; saves x itself and r |
| backward | dy [R,h] | g = dy · w; dx = r (g − x̂ · mean(g x̂)); dw = Σ_rows dy x̂             |

dw is partial over the axes that split the rows, and summed over them once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.params import StoredParameter, Use


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, parameter: Any, stored: StoredParameter, use: Use | None, eps: float
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = (length.square() / x.shape[-1] + eps).rsqrt()
        weight = stored.lease()
        ctx.stored, ctx.use = stored, use
        ctx.save_for_backward(x, inverse, weight)
        y: torch.Tensor = (x * inverse).to(x.dtype).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        x, inverse, weight = ctx.saved_tensors
        unit = x * inverse
        if ctx.needs_input_grad[1]:
            ctx.stored.deposit((dy * unit).flatten(0, -2).sum(0).to(weight.dtype), ctx.use)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy * weight.to(inverse.dtype)
            along = (dx * unit).mean(-1, keepdim=True)
            dx.sub_(unit.mul_(along)).mul_(inverse)
            dx = dx.to(x.dtype)
        return dx, None, None, None, None


class GridRMSNorm(nn.Module):
    """RMSNorm with a DTensor weight, whole on every rank.

    x [.., h] → [.., h]. Statistics are taken in at least fp32. The weight's gradient is summed over ``partial_axes``,
    the axes that split the rows.
    """

    def __init__(self, stored: StoredParameter, eps: float):
        super().__init__()
        self.weight = stored.parameter
        self.stored = stored
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] → w · x / sqrt(mean x² + ε), in x's dtype."""
        y: torch.Tensor = _Normalise.apply(x, self.weight, self.stored, self.stored.use(), self.eps)
        return y
