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
from shardwright.linear import pieces
from shardwright.linear.pieces import Piece, WeightGradients
from shardwright.linear.product import Product
from shardwright.mesh import chunk


def forward(
    product: Product,
    x: torch.Tensor,
    rows: int,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    keep: bool,
    hold: Callable[[torch.Tensor], None] | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Y_i for T = ``rows``, and what backward needs of X (None unless ``keep``).

    Where k is split, Y_i is leased as ``unreduced`` and lacks its bias: the reduction that follows ends the lease.
    hold: takes over the gathered X, still leased, where backward is at work already (a replay).
    """
    gathered = gather(product, x, rows) if product.gather_x.size > 1 else x
    outputs = [new_output(product, gathered.shape[0], x, weight) for weight in weights]
    for piece in cut(product, gathered.shape[0]):
        pieces.multiply(gathered[piece.rows], weights, biases, outputs, piece.rows)
    return outputs, settle_x(product, x, gathered, keep, hold)


def backward(
    product: Product,
    grads: Sequence[torch.Tensor | None],
    kept: torch.Tensor | None,
    rows: int,
    weights: Sequence[torch.Tensor],
    needs_x: bool,
    into: WeightGradients | None,
    held: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """dX [R,K'] or None; dW_i and db_i go ``into`` the store. held: the gathered X, where a replay has left it."""
    arena = product.runtime.arena
    x = held if held is not None else kept
    if held is None and kept is not None and product.gather_x.size > 1 and not product.keep_gathered:
        x = gather(product, kept, rows)
    dx = None
    if needs_x and any(grad is not None for grad in grads):
        dx = new_input_gradient(product, grads, weights)
        for piece in cut(product, dx.shape[0]):
            pieces.input_gradient(rows_of(grads, piece), weights, dx[piece.rows])
        dx = reduce_input_gradient(product, dx)
    if into is not None:
        if product.layout.chunks:
            for piece in cut(product, max(grad.shape[0] for grad in grads if grad is not None)):
                into.add(rows_of(grads, piece), x[piece.rows] if x is not None else None)
            into.finish()
        else:
            into.all_at_once(grads, x)
    for grad in grads:
        if grad is not None:
            arena.end(grad)
    if x is not None and x is not kept:
        arena.end(x)
    return dx


def cut(product: Product, rows: int) -> list[Piece]:
    """The pieces of tokens that products are cut into; one where the layout states no chunks."""
    if not product.layout.chunks:
        return pieces.whole(rows)
    return pieces.cut_tokens(rows, product.tokens_group, product.layout.chunks)


def rows_of(grads: Sequence[torch.Tensor | None], piece: Piece) -> list[torch.Tensor | None]:
    """Those rows of every dY_i."""
    return [None if grad is None else grad[piece.rows] for grad in grads]


def gather(product: Product, x: torch.Tensor, rows: int) -> torch.Tensor:
    """X [R,K'] of every rank → [rows,K'], leased."""
    gathered = lease_x(product, x, rows)
    all_gather(x, gathered, product.gather_x, product.name)
    return gathered


def lease_x(product: Product, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Room for the gathered X [rows,K']."""
    shape = (rows, x.shape[1])
    return product.runtime.arena.lease(shape, x.dtype, x.device, "gathered", f"{product.name} (X)")


def settle_x(
    product: Product,
    x: torch.Tensor,
    gathered: torch.Tensor,
    keep: bool,
    hold: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor | None:
    """What backward keeps of X: the gathered tensor, what came in, or nothing. Ends the lease of what nobody keeps."""
    arena = product.runtime.arena
    if keep and product.keep_gathered:
        return arena.give(gathered)
    if keep and hold is not None and gathered is not x:
        hold(gathered)
    else:
        arena.end(gathered)
    return x if keep else None


def new_output(product: Product, rows: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Room for Y_i [rows,N'_i]: leased where it is still to be reduced."""
    shape = (rows, weight.shape[0])
    if product.reduce_y.size > 1:
        return product.runtime.arena.lease(shape, x.dtype, x.device, "unreduced", f"{product.name} (Y)")
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def new_input_gradient(
    product: Product, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Room for dX [T,K']: leased where it is still to be reduced."""
    grad = next(grad for grad in grads if grad is not None)
    shape = (grad.shape[0], weights[0].shape[1])
    if product.gather_x.size == 1 and product.reduce_dx.size == 1:
        return torch.empty(shape, dtype=grad.dtype, device=grad.device)
    return product.runtime.arena.lease(shape, grad.dtype, grad.device, "unreduced", f"{product.name} (dX)")


def new_part(product: Product, dx: torch.Tensor) -> torch.Tensor:
    """Room for this rank's rows of dX [T,K']."""
    start, stop = chunk(dx.shape[0], product.gather_x.size, product.gather_x.index)
    return dx.new_empty(stop - start, dx.shape[1])


def reduce_input_gradient(product: Product, dx: torch.Tensor) -> torch.Tensor:
    """dX [T,K'], partial over n → this rank's rows [R,K'] where X was gathered, all of it where X is whole."""
    if product.gather_x.size > 1:
        part = new_part(product, dx)
        reduce_scatter(dx, part, product.gather_x, product.name, product.wide)
        product.runtime.arena.end(dx)
        return part
    if product.reduce_dx.size > 1:
        all_reduce(dx, product.reduce_dx, product.name, product.wide)
        product.runtime.arena.give(dx)
    return dx
