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

import torch

from shardwright.comm import Gathering, Reducing, Scattering, all_reduce
from shardwright.linear import blocking, pieces
from shardwright.linear.carousel import multiply_back, reduced_products
from shardwright.linear.pieces import Piece
from shardwright.linear.product import Product
from shardwright.linear.work import Backward, Forward

MODE = "async"


def forward(work: Forward) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As blocking.forward."""
    product = work.product
    if product.gather_x.size == 1 or product.x_by_features:
        return blocking.forward(work)
    gathered = blocking.lease_x(product, work.x, work.rows, work.width)
    arrivals = Gathering(work.x, gathered, product.gather_x, product.name, MODE)
    weights, biases = work.lease()
    outputs = [blocking.new_output(product, work.rows, work.x, weight) for weight in weights]
    for piece in cut(product, work.rows):
        arrivals.wait(piece.peer)
        pieces.multiply(gathered[piece.rows], weights, biases, outputs, piece.rows)
    arrivals.finish()
    return outputs, blocking.settle_x(work, gathered)


def backward(work: Backward) -> torch.Tensor | None:
    """As blocking.backward."""
    product, arena = work.product, work.product.runtime.arena
    if product.x_by_features:
        return blocking.backward(work)
    x, arrivals = work.held if work.held is not None else work.kept, None
    if work.kept is not None and work.gathers_again:
        x = blocking.lease_x(product, work.kept, work.rows, work.width)
        arrivals = Gathering(work.kept, x, product.gather_x, product.name, MODE)
    dx, unreduced = None, None
    if work.needs_x and work.present:
        dx = unreduced = blocking.input_gradient(work)
        work.release()
    if arrivals is not None:
        arrivals.finish()
    reduction: Scattering | Reducing | None = None
    if dx is not None and unreduced is not None and product.gather_x.size > 1:
        dx = blocking.new_part(product, unreduced)
        reduction = Scattering(unreduced, dx, product.gather_x, product.name, MODE, product.wide)
    elif dx is not None and product.reduce_dx.size > 1:
        reduction = Reducing(dx, product.reduce_dx, product.name, MODE, product.wide)
    if work.into is not None:
        for piece in cut(product, blocking.rows_of_products(work)):
            work.into.add(blocking.rows_of(work.grads, piece), x[piece.rows] if x is not None else None)
            if isinstance(reduction, Scattering):
                reduction.advance()
    if reduction is not None and unreduced is not None and dx is not None:
        reduction.finish()
        if dx is unreduced:
            arena.give(unreduced)
        else:
            arena.end(unreduced)
            all_reduce(dx, product.reduce_dx, product.name, product.wide)
    if work.into is not None:
        work.into.finish()
    for grad in work.present:
        arena.end(grad)
    if x is not None and x is not work.kept:
        arena.end(x)
    return dx


def cut(product: Product, rows: int) -> list[Piece]:
    """One piece a rank at least: that is what travels."""
    return pieces.cut_tokens(rows, product.tokens_group, product.layout.chunks or 1)


def reduced(work: Forward) -> list[torch.Tensor]:
    """Y_i [T/n,N_i] = this rank's rows of Σ_ranks X W_iᵀ, X [T,K']."""
    return reduced_products(work, work.product.layout.chunks or 1, MODE)


def gathered_backward(work: Backward) -> torch.Tensor | None:
    """dX [T,K'] and dW of a row site from this rank's rows dY_i [T/n,N_i]: gathered, multiplied as they arrive."""
    product, arena = work.product, work.product.runtime.arena
    wholes: list[torch.Tensor | None] = []
    arrivals: list[Gathering] = []
    for grad in work.grads:
        gathered = None
        if grad is not None:
            shape = (work.rows, grad.shape[1])
            gathered = arena.lease(shape, grad.dtype, grad.device, "gathered", f"{product.name} (dY)")
            arrivals.append(Gathering(grad, gathered, product.scatter_y, product.name, MODE))
        wholes.append(gathered)
    weights, dx = weights_and_room(work)
    for piece in cut(product, work.rows):
        for arrival in arrivals:
            arrival.wait(piece.peer)
        multiply_back(blocking.rows_of(wholes, piece), work, piece, weights, dx)
    work.release()
    for arrival in arrivals:
        arrival.finish()
    if work.into is not None:
        work.into.finish()
    for gathered in wholes:
        if gathered is not None:
            arena.end(gathered)
    return dx


def weights_and_room(work: Backward) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """W_i, and room for a row site's dX [T,K']; nothing where dX is not wanted, or no gradient came."""
    if not (work.needs_x and work.present):
        return [], None
    return work.lease(), work.present[0].new_empty(work.rows, work.width)
