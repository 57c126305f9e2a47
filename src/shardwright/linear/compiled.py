"""A site under torch.compile: forward and backward as custom operators.

A compiler that sees the gather of backward is the gather of forward keeps the gathered tensor instead, and the saving
silently disappears. Inside an operator of our own it sees neither: what is saved is the operator's input, the shard.
The bodies are those of eager mode (the overlap modes' ``forward`` and ``backward``), so collectives are the same.

Operators take tensors and numbers only; a number tells the site, which a table holds weakly.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardwright.overlap.pieces import WeightGradients
from shardwright.overlap.product import Product
from shardwright.params.parameter_group import Use
from shardwright.params.stored import StoredParameter

Uses = list[tuple[Use | None, Use | None]]
"""What one forward announced to the store: (of W_i, of its inner bias), a linear each."""


class Site(Protocol):
    """What the operators ask of a site: its products in eager mode (``linear/site_product.py``)."""

    product: Product
    outer_biases: list[StoredParameter | None]

    @property
    def width(self) -> int:
        """K'."""

    @property
    def widths(self) -> list[int]:
        """N'_i of every linear."""

    def fetch(self) -> None:
        """Begins to gather every W."""

    def multiply(self, x: torch.Tensor, rows: int, keep: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """(Y_i, what backward keeps of X)."""

    def multiply_reduced(self, x: torch.Tensor, rows: int, keep: bool) -> list[torch.Tensor]:
        """Y_i, reduced."""

    def multiply_back(
        self,
        grads: Sequence[torch.Tensor | None],
        kept: torch.Tensor | None,
        rows: int,
        needs_x: bool,
        into: WeightGradients | None,
        uses: Uses,
    ) -> torch.Tensor | None:
        """dX, or None."""

    def weight_gradients(self) -> WeightGradients | None:
        """Where the gradients of the weights and inner biases go."""


_SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


def number_of(site: Site) -> int:
    """Enters the site into the table; its number for the operators."""
    number = next(_NUMBERS)
    _SITES[number] = site
    return number


@torch.library.custom_op("shardwright::site", mutates_args=())
def site_forward(x: torch.Tensor, anchor: torch.Tensor, number: int, rows: int) -> list[torch.Tensor]:
    """[Y_1, …, Y_s] (reduced), and the gathered X where backward keeps it.

    anchor: an empty tensor that wants a gradient, so that a backward comes where only the weights want theirs.
    """
    site = _SITES[number]
    product = site.product
    if product.resolved.deferred:
        return [*_biased(site, site.multiply_reduced(x, rows, True))]
    outputs, kept = site.multiply(x, rows, True)
    if product.splits_k:
        outputs = [product.reduction.sum(y) for y in outputs]
    return [*_biased(site, outputs), *([kept] if kept is not None and _keeps(site) else [])]


@site_forward.register_fake
def _(x: torch.Tensor, anchor: torch.Tensor, number: int, rows: int) -> list[torch.Tensor]:
    site = _SITES[number]
    outputs = [x.new_empty(site.product.shape_out(rows, width)) for width in site.widths]
    whole = x.new_empty(site.width, rows).t() if site.product.x_by_features else x.new_empty(rows, site.width)
    return [*outputs, *([whole] if _keeps(site) else [])]


@torch.library.custom_op("shardwright::site_backward", mutates_args=())
def site_backward(
    grads: list[torch.Tensor], kept: torch.Tensor, number: int, rows: int, needs_x: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dX, or nothing where it is not wanted; an empty gradient for the anchor). dW and db go to the store."""
    site = _SITES[number]
    for grad, bias in zip(grads, site.outer_biases, strict=True):
        if bias is not None and bias.parameter.requires_grad:
            bias.deposit(grad.sum(0))
    grads = [grad.contiguous() for grad in grads]
    if not site.product.resolved.deferred:
        if needs_x:
            site.fetch()
        shapes = [(rows, width) for width in site.widths]
        grads = [site.product.reduction.gather(grad, shape) for grad, shape in zip(grads, shapes, strict=True)]
    none: Uses = [(None, None)] * len(grads)
    dx = site.multiply_back(grads, kept, rows, needs_x, site.weight_gradients(), none)
    return (dx if dx is not None else kept.new_empty(0)), kept.new_empty(0)


@site_backward.register_fake
def _(
    grads: list[torch.Tensor], kept: torch.Tensor, number: int, rows: int, needs_x: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    site = _SITES[number]
    shape = site.product.shape_in(rows, site.width) if needs_x else (0,)
    return kept.new_empty(shape), kept.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, ctx.number, ctx.rows = inputs
    ctx.needs_x = ctx.needs_input_grad[0]
    ctx.save_for_backward(output[-1] if _keeps(_SITES[ctx.number]) else x)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    (kept,) = ctx.saved_tensors
    outputs = grads[:-1] if _keeps(_SITES[ctx.number]) else grads
    dx, anchor = torch.ops.shardwright.site_backward(list(outputs), kept, ctx.number, ctx.rows, ctx.needs_x)
    return dx if ctx.needs_x else None, anchor, None, None


site_forward.register_autograd(_backward, setup_context=_setup)


def _keeps(site: Site) -> bool:
    return site.product.keep_gathered and site.product.gather_x.size > 1


def _biased(site: Site, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    for y, bias in zip(outputs, site.outer_biases, strict=True):
        if bias is not None:
            y.add_(bias.lease())
    return outputs
