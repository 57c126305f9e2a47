"""The blocking mode: every collective is finished before the next product starts.

R tokens come in on this rank, T over the axes that split X are multiplied; K', N' are the local features. Weights are
read as [N',K'] (a weight stored the other way round comes as a transposed view).

| pass     | in                | collectives                    | products                      | out            |
|----------|-------------------|--------------------------------|-------------------------------|----------------|
| forward  | X [R,K']          | all-gather X → [T,K']          | Y_i [T,N'_i] = X W_iᵀ (+ b_i) | Y_i (partial over k) |
| backward | dY_i [T,N'_i]     | all-gather X, if not kept      | dX [T,K'] = Σ dY_i W_i        |                |
|          |                   | reduce-scatter dX (all-reduce where X is whole) |              | dX [R,K']      |
|          |                   |                                | dW_i [N'_i,K'] = dY_iᵀ X      | to the store   |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.comm import all_gather, all_reduce, reduce_scatter
from shardwright.linear.product import Product
from shardwright.mesh import chunk


def forward(
    product: Product,
    x: torch.Tensor,
    rows: int,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    keep: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Y_i for T = ``rows``, and what backward needs of X (None unless ``keep``).

    Where k is split, Y_i is leased as ``unreduced`` and lacks its bias: the reduction that follows ends the lease.
    """
    arena = product.runtime.arena
    whole = gather(product, x, rows) if product.gather_x.size > 1 else x
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        if product.reduce_y.size > 1:
            shape = (whole.shape[0], weight.shape[0])
            y = arena.lease(shape, x.dtype, x.device, "unreduced", f"{product.name} (Y)")
            torch.mm(whole, weight.t(), out=y)
        else:
            y = torch.nn.functional.linear(whole, weight, bias)
        outputs.append(y)
    if keep and product.keep_gathered:
        return outputs, arena.give(whole)
    arena.end(whole)
    return outputs, x if keep else None


def backward(
    product: Product,
    grads: Sequence[torch.Tensor | None],
    kept: torch.Tensor | None,
    rows: int,
    weights: Sequence[torch.Tensor],
    needs_x: bool,
    deposit: Callable[[int, torch.Tensor, torch.Tensor | None], None] | None,
) -> torch.Tensor | None:
    """dX [R,K'] or None. ``deposit(i, dY_i, X)`` forms and hands over dW_i and db_i (X is None where W is frozen)."""
    arena = product.runtime.arena
    whole = kept
    if kept is not None and product.gather_x.size > 1 and not product.keep_gathered:
        whole = gather(product, kept, rows)
    dx = input_gradient(product, grads, weights) if needs_x else None
    for index, grad in enumerate(grads):
        if grad is None:
            continue
        if deposit is not None:
            deposit(index, grad, whole)
        arena.end(grad)
    if whole is not None and whole is not kept:
        arena.end(whole)
    return dx


def gather(product: Product, x: torch.Tensor, rows: int) -> torch.Tensor:
    """X [R,K'] of every rank → [rows,K'], leased."""
    shape = (rows, x.shape[1])
    whole = product.runtime.arena.lease(shape, x.dtype, x.device, "gathered", f"{product.name} (X)")
    all_gather(x, whole, product.gather_x, product.name)
    return whole


def input_gradient(
    product: Product, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """dX = Σ dY_i W_i [T,K'], reduced: this rank's rows [R,K'] where X was gathered, all of it where X is whole."""
    arena = product.runtime.arena
    pairs = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    if not pairs:
        return None
    (grad, weight), *rest = pairs
    if product.gather_x.size == 1 and product.reduce_dx.size == 1:
        dx = torch.mm(grad, weight)
    else:
        shape = (grad.shape[0], weight.shape[1])
        dx = arena.lease(shape, grad.dtype, grad.device, "unreduced", f"{product.name} (dX)")
        torch.mm(grad, weight, out=dx)
    for grad, weight in rest:
        dx.addmm_(grad, weight)
    if product.gather_x.size > 1:
        start, stop = chunk(dx.shape[0], product.gather_x.size, product.gather_x.index)
        part = dx.new_empty(stop - start, dx.shape[1])
        reduce_scatter(dx, part, product.gather_x, product.name)
        arena.end(dx)
        return part
    if product.reduce_dx.size > 1:
        all_reduce(dx, product.reduce_dx, product.name)
        arena.give(dx)
    return dx
