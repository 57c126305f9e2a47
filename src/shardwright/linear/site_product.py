"""A site's products as one autograd node, whatever the number of linears.

The node gathers once, saves once, and issues the reduction of dX before it forms the dWs. The reduction of Y is a node
of its own (comm/reduction.py). The first sibling called with a tensor computes all; the others take their result.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.comm import reduce_output
from shardwright.linear import blocking
from shardwright.linear.product import Product
from shardwright.params import StoredParameter, Use

_MODES = {"blocking": blocking}


class _SiteNode(torch.autograd.Function):
    """The parameters come in only to join the graph: their gradients go to the store, not to the engine."""

    @staticmethod
    def forward(
        ctx: Any, site: SiteProduct, uses: Any, rows: int, x: torch.Tensor, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights = site.lease_weights()
        biases = [stored.lease() if stored is not None else None for stored in site.inner_biases]
        mode = _MODES[site.product.layout.overlap]
        ctx.site, ctx.uses, ctx.mode, ctx.rows = site, uses, mode, rows
        wanted = ctx.needs_input_grad[4:]
        ctx.deposits = any(wanted)
        outputs, kept = mode.forward(site.product, x, rows, weights, biases, keep=any(wanted[: len(weights)]))
        ctx.save_for_backward(kept, *(weights if ctx.needs_input_grad[3] else ()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        deposit = ctx.site.depositor(ctx.uses) if ctx.deposits else None
        if not weights:
            weights = [None] * len(grads)
        needs_x = ctx.needs_input_grad[3]
        dx = ctx.mode.backward(ctx.site.product, grads, kept, ctx.rows, weights, needs_x, deposit)
        return (None, None, None, dx) + (None,) * (len(ctx.needs_input_grad) - 4)


class _AddBias(torch.autograd.Function):
    """Y [R,N] += b [N], after the reduction of Y; db [N] = Σ_rows dY goes to the store."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, parameter: Any, stored: StoredParameter, use: Use | None) -> torch.Tensor:
        ctx.stored, ctx.use = stored, use
        y.add_(stored.lease())
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.needs_input_grad[1]:
            ctx.stored.deposit(grads[0].sum(0), ctx.use)
        return grads[0], None, None, None


class SiteProduct:
    """The products of one site, shared by its linears.

    weights, biases: the stored parameters of each linear, in order. Where k is split, a bias is added once, after the
    reduction (outer); else inside the product (inner). transposed: weights stored as [K,N].
    """

    def __init__(
        self,
        product: Product,
        weights: list[StoredParameter],
        biases: list[StoredParameter | None],
        transposed: bool = False,
    ):
        none: list[StoredParameter | None] = [None] * len(biases)
        self.product = product
        self.weights = weights
        self.transposed = transposed
        self.tokens: int | None = None  # T of the forward at work, where the model tells it
        self.inner_biases, self.outer_biases = (none, biases) if product.reduce_y.size > 1 else (biases, none)
        self._key: object = None
        self._ready: dict[int, torch.Tensor] = {}

    def lease_weights(self) -> list[torch.Tensor]:
        """Every W_i as [N',K']."""
        leased = [stored.lease() for stored in self.weights]
        return [weight.t() for weight in leased] if self.transposed else leased

    def __call__(self, key: object, x: torch.Tensor, rows: int, index: int) -> torch.Tensor:
        """Y_index of x [R,K'], T = ``rows``. ``key`` is what the caller was given: by it siblings find each other."""
        if self._key is not key or index not in self._ready:
            self._ready = dict(enumerate(self._compute(x, rows)))
            self._key = key
        y = self._ready.pop(index)
        if not self._ready:
            self._key = None
        return y

    def clear(self) -> None:
        """Forgets results that no sibling has taken."""
        self._key, self._ready = None, {}

    def _compute(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        inside = self.inner_biases
        uses = [(w.use(), b.use() if b is not None else None) for w, b in zip(self.weights, inside, strict=True)]
        parameters = [stored.parameter for stored in [*self.weights, *inside] if stored is not None]
        product, results = self.product, []
        for y, bias in zip(_SiteNode.apply(self, uses, rows, x, *parameters), self.outer_biases, strict=True):
            y = reduce_output(y, product.runtime, product.reduce_y, product.y_word, product.name)
            if bias is not None:
                y = _AddBias.apply(y, bias.parameter, bias, bias.use())
            results.append(y)
        return results

    def depositor(self, uses: list[tuple[Use | None, Use | None]]) -> Any:
        """deposit(i, dY_i [T,N'], X [T,K']): forms dW_i and db_i and hands them to the store."""

        def deposit(index: int, grad: torch.Tensor, x: torch.Tensor | None) -> None:
            weight, bias = self.weights[index], self.inner_biases[index]
            if weight.parameter.requires_grad and x is not None:
                dw = torch.mm(x.t(), grad) if self.transposed else torch.mm(grad.t(), x)
                weight.deposit(dw, uses[index][0])
            if bias is not None and bias.parameter.requires_grad:
                bias.deposit(grad.sum(0), uses[index][1])

        return deposit
