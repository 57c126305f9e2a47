"""The async mode: collectives run beside the products that do not need them. Same signature as blocking.py.

| site, pass               | what happens, in order                                                              |
|--------------------------|-------------------------------------------------------------------------------------|
| column, forward          | issue all-gather X · product of the own part · the others as they arrive            |
| column, backward         | issue all-gather X · dX · wait for X · issue reduce-scatter dX · dW · wait          |
| the same, X whole        | dX · issue all-reduce dX · dW · wait                                                |
| row, forward             | product of a piece beside the transfer of the one before (carousel.py)              |
| row, backward            | issue all-gather dY · dX and dW of the own part · the others as they arrive         |

dW is formed piece by piece, and between pieces an arrival of the reduction is taken in.
Nothing waits between the issue of the reduction of dX and the first piece of dW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.comm import Gathering, Reducing, Scattering
from shardwright.linear import blocking, pieces
from shardwright.linear.carousel import multiply_back, reduced_products
from shardwright.linear.pieces import Piece, WeightGradients
from shardwright.linear.product import Product

MODE = "async"


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
    if product.gather_x.size == 1:
        return blocking.forward(product, x, rows, weights, biases, keep, hold)
    gathered = blocking.lease_x(product, x, rows)
    arrivals = Gathering(x, gathered, product.gather_x, product.name, MODE)
    outputs = [blocking.new_output(product, rows, x, weight) for weight in weights]
    for piece in cut(product, rows):
        arrivals.wait(piece.peer)
        pieces.multiply(gathered[piece.rows], weights, biases, outputs, piece.rows)
    arrivals.finish()
    return outputs, blocking.settle_x(product, x, gathered, keep, hold)


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
    arena = product.runtime.arena
    x, arrivals = held if held is not None else kept, None
    if held is None and kept is not None and product.gather_x.size > 1 and not product.keep_gathered:
        x = blocking.lease_x(product, kept, rows)
        arrivals = Gathering(kept, x, product.gather_x, product.name, MODE)
    count = max((grad.shape[0] for grad in grads if grad is not None), default=0)
    dx, unreduced = None, None
    if needs_x and any(grad is not None for grad in grads):
        dx = unreduced = blocking.new_input_gradient(product, grads, weights)
        for piece in cut(product, count):
            pieces.input_gradient(blocking.rows_of(grads, piece), weights, unreduced[piece.rows])
    if arrivals is not None:
        arrivals.finish()
    reduction: Scattering | Reducing | None = None
    if dx is not None and unreduced is not None and product.gather_x.size > 1:
        dx = blocking.new_part(product, unreduced)
        reduction = Scattering(unreduced, dx, product.gather_x, product.name, MODE, product.wide)
    elif dx is not None and product.reduce_dx.size > 1:
        reduction = Reducing(dx, product.reduce_dx, product.name, MODE, product.wide)
    if into is not None:
        for piece in cut(product, count):
            into.add(blocking.rows_of(grads, piece), x[piece.rows] if x is not None else None)
            if isinstance(reduction, Scattering):
                reduction.advance()
    if reduction is not None and unreduced is not None:
        reduction.finish()
        if dx is unreduced:
            arena.give(unreduced)
        else:
            arena.end(unreduced)
    if into is not None:
        into.finish()
    for grad in grads:
        if grad is not None:
            arena.end(grad)
    if x is not None and x is not kept:
        arena.end(x)
    return dx


def cut(product: Product, rows: int) -> list[Piece]:
    """One piece a rank at least: that is what travels."""
    return pieces.cut_tokens(rows, product.tokens_group, product.layout.chunks or 1)


def reduced(product: Product, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Y_i [T/n,N_i] = this rank's rows of Σ_ranks X W_iᵀ, X [T,K']."""
    return reduced_products(product, x, weights, product.layout.chunks or 1, MODE)


def gathered_backward(
    product: Product,
    grads: Sequence[torch.Tensor | None],
    kept: torch.Tensor | None,
    rows: int,
    weights: Sequence[torch.Tensor],
    needs_x: bool,
    into: WeightGradients | None,
) -> torch.Tensor | None:
    """dX [T,K'] and dW of a row site from this rank's rows dY_i [T/n,N_i]: gathered, multiplied as they arrive."""
    group, arena = product.reduce_y, product.runtime.arena
    wholes: list[torch.Tensor | None] = []
    arrivals: list[Gathering] = []
    for grad in grads:
        gathered = None
        if grad is not None:
            shape = (rows, grad.shape[1])
            gathered = arena.lease(shape, grad.dtype, grad.device, "gathered", f"{product.name} (dY)")
            arrivals.append(Gathering(grad, gathered, group, product.name, MODE))
        wholes.append(gathered)
    dx = new_whole_gradient(grads, weights, rows) if needs_x else None
    for piece in cut(product, rows):
        for arrival in arrivals:
            arrival.wait(piece.peer)
        multiply_back(blocking.rows_of(wholes, piece), kept, piece, weights, dx, into)
    for arrival in arrivals:
        arrival.finish()
    if into is not None:
        into.finish()
    for gathered in wholes:
        if gathered is not None:
            arena.end(gathered)
    return dx


def new_whole_gradient(
    grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor], rows: int
) -> torch.Tensor | None:
    """Room for a row site's dX [T,K']; None where no gradient came."""
    for grad in grads:
        if grad is not None:
            return grad.new_empty(rows, weights[0].shape[1])
    return None
