"""A site under torch.compile: forward and backward as custom operators.

A compiler that sees the gather of backward is the gather of forward keeps the gathered tensor instead, and the saving
silently disappears. Inside an operator of our own it sees neither: what is saved is the operator's input, the shard.
The bodies are those of eager mode (the overlap modes' ``forward`` and ``backward``), so collectives are the same.

Operators take tensors and numbers only; a number tells the site, which a table holds weakly.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardwright.comm.reduction import gather_rows, reduce_rows
from shardwright.mesh import chunk

if TYPE_CHECKING:
    from shardwright.linear.site_product import SiteProduct

_SITES: weakref.WeakValueDictionary[int, SiteProduct] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


def number_of(site: SiteProduct) -> int:
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
    product, weights = site.product, site.lease_weights()
    if product.defers:
        return [*_biased(site, site.mode.reduced(product, x, weights))]
    biases = [stored.lease() if stored is not None else None for stored in site.inner_biases]
    outputs, kept = site.mode.forward(product, x, rows, weights, biases, True)
    outputs = [
        reduce_rows(y, product.runtime, product.reduce_y, product.y_word, product.name, product.wide) for y in outputs
    ]
    return [*_biased(site, outputs), *([kept] if _keeps(site) else [])]


@site_forward.register_fake
def _(x: torch.Tensor, anchor: torch.Tensor, number: int, rows: int) -> list[torch.Tensor]:
    site = _SITES[number]
    group = site.product.reduce_y
    height = rows
    if group.size > 1 and site.product.y_word == "sharded":
        start, stop = chunk(rows, group.size, group.index)
        height = stop - start
    outputs = [x.new_empty(height, width) for width in site.widths]
    return [*outputs, *([x.new_empty(rows, x.shape[1])] if _keeps(site) else [])]


@torch.library.custom_op("shardwright::site_backward", mutates_args=())
def site_backward(
    grads: list[torch.Tensor], kept: torch.Tensor, number: int, rows: int, needs_x: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dX, or nothing where it is not wanted; an empty gradient for the anchor). dW and db go to the store."""
    site = _SITES[number]
    product, weights = site.product, site.lease_weights()
    for grad, bias in zip(grads, site.outer_biases, strict=True):
        if bias is not None and bias.parameter.requires_grad:
            bias.deposit(grad.sum(0))
    into = site.weight_gradients([(None, None)] * len(weights))
    grads = [grad.contiguous() for grad in grads]
    if product.defers:
        dx = site.mode.gathered_backward(product, grads, kept, rows, weights, needs_x, into)
    else:
        if product.reduce_y.size > 1 and product.y_word == "sharded":
            grads = [gather_rows(g, rows, product.runtime, product.reduce_y, product.name) for g in grads]
        dx = site.mode.backward(product, grads, kept, rows, weights, needs_x, into, None)
    site.finish([(None, None)] * len(weights))
    return (dx if dx is not None else kept.new_empty(0)), kept.new_empty(0)


@site_backward.register_fake
def _(
    grads: list[torch.Tensor], kept: torch.Tensor, number: int, rows: int, needs_x: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = _SITES[number].product.gather_x
    start, stop = chunk(rows, group.size, group.index)
    return kept.new_empty(stop - start, kept.shape[1]) if needs_x else kept.new_empty(0), kept.new_empty(0)


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


def _keeps(site: SiteProduct) -> bool:
    return site.product.keep_gathered and site.product.gather_x.size > 1


def _biased(site: SiteProduct, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    for y, bias in zip(outputs, site.outer_biases, strict=True):
        if bias is not None:
            y.add_(bias.lease())
    return outputs
