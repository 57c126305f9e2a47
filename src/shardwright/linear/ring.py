"""The ring mode: pieces travel around the axis, so that neither a gathered operand nor an unreduced result ever exists.

Same signature as blocking.py. Transients, in pieces of 1/(n·chunks) of the operand (carousel.py):

| site   | pass     | travels                   | alive at a time   |
|--------|----------|---------------------------|-------------------|
| column | forward  | X                         | 2 of X            |
| column | backward | X for dW; dX being summed | 2 of X, 2 of dX   |
| row    | forward  | Y being summed            | 2 of Y            |
| row    | backward | dY                        | 2 of dY           |

Where X is kept gathered it is gathered as async does it; where X is whole on the n axes nothing can travel but dX,
which is all-reduced as async does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.linear import asynchronous, blocking, pieces
from shardwright.linear.carousel import Carousel, RunningSum, multiply_back, reduced_products
from shardwright.linear.pieces import Piece, WeightGradients
from shardwright.linear.product import Product
from shardwright.mesh import chunk

MODE = "ring"


def chunks_of(product: Product) -> int:
    """Pieces a part: what the layout states; else 1, and 2 between two ranks, whose pieces would else be halves."""
    return product.layout.chunks or (2 if product.tokens_group.size == 2 else 1)


def forward(
    product: Product,
    x: torch.Tensor,
    rows: int,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    keep: bool,
    hold: Callable[[torch.Tensor], None] | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As blocking.forward."""
    if product.gather_x.size == 1 or (keep and product.keep_gathered):
        return asynchronous.forward(product, x, rows, weights, biases, keep, hold)
    outputs = [blocking.new_output(product, rows, x, weight) for weight in weights]
    carousel = Carousel(x, rows, product, product.gather_x, chunks_of(product), MODE, "X")
    for piece in carousel.turns:
        pieces.multiply(carousel.take(), weights, biases, outputs, piece.rows)
        carousel.pass_on()
    carousel.end()
    return outputs, x if keep else None


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
    """As blocking.backward."""
    if product.gather_x.size == 1:
        return asynchronous.backward(product, grads, kept, rows, weights, needs_x, into, held)
    group, chunks = product.gather_x, chunks_of(product)
    dx, total, carousel = None, None, None
    present = [grad for grad in grads if grad is not None]
    if needs_x and present:
        start, stop = chunk(rows, group.size, group.index)
        dx = present[0].new_empty(stop - start, weights[0].shape[1])

        def share(piece: Piece, out: torch.Tensor) -> None:
            pieces.input_gradient(blocking.rows_of(grads, piece), weights, out)

        total = RunningSum(dx, rows, product, group, chunks, MODE, "dX", share)
    if kept is not None and not product.keep_gathered:
        carousel = Carousel(kept, rows, product, group, chunks, MODE, "X")
    for piece in pieces.cut_tokens(rows, group, chunks):
        taken = carousel.take() if carousel is not None else None if kept is None else kept[piece.rows]
        if into is not None:
            into.add(blocking.rows_of(grads, piece), taken)
        if total is not None:
            total.step()
        if carousel is not None:
            carousel.pass_on()
    for travelling in (total, carousel):
        if travelling is not None:
            travelling.end()
    if into is not None:
        into.finish()
    for grad in present:
        product.runtime.arena.end(grad)
    return dx


def reduced(product: Product, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Y_i [T/n,N_i] = this rank's rows of Σ_ranks X W_iᵀ, X [T,K']."""
    return reduced_products(product, x, weights, chunks_of(product), MODE)


def gathered_backward(
    product: Product,
    grads: Sequence[torch.Tensor | None],
    kept: torch.Tensor | None,
    rows: int,
    weights: Sequence[torch.Tensor],
    needs_x: bool,
    into: WeightGradients | None,
) -> torch.Tensor | None:
    """dX [T,K'] and dW of a row site from this rank's rows dY_i [T/n,N_i], which travel around."""
    dx = asynchronous.new_whole_gradient(grads, weights, rows) if needs_x else None
    carousels = [
        None if grad is None else Carousel(grad, rows, product, product.reduce_y, chunks_of(product), MODE, "dY")
        for grad in grads
    ]
    for piece in pieces.cut_tokens(rows, product.reduce_y, chunks_of(product)):
        taken = [None if carousel is None else carousel.take() for carousel in carousels]
        multiply_back(taken, kept, piece, weights, dx, into)
        for carousel in carousels:
            if carousel is not None:
                carousel.pass_on()
    for carousel in carousels:
        if carousel is not None:
            carousel.end()
    if into is not None:
        into.finish()
    return dx
