"""The blocking mode: every collective is finished before the next product starts.

R tokens come in on this rank, T over the axes that split X are multiplied; K', N' are the local features of the
product. Weights are read as [N',K'] (a weight stored the other way round comes as a transposed view). The gather of W,
where there is one, was begun before (site_product.py) and is waited for when W is leased.

| pass     | in            | collectives                | products                      | out                  |
|----------|---------------|----------------------------|-------------------------------|----------------------|
| forward  | X [R,K']      | all-gather X → [T,K']      | Y_i [T,N'_i] = X W_iᵀ (+ b_i) | Y_i (partial over k) |
| backward | dY_i [T,N'_i] | all-gather X, if not kept  | dX [T,K'] = Σ dY_i W_i        |                      |
|          |               | reduce-scatter dX          |                               | dX [R,K']            |
|          |               | (all-reduce: X is whole)   | dW_i [N'_i,K'] = dY_iᵀ X      | to the store         |

Where W is gathered too, backward lets go of W before it forms dW, and gathers X after dX has gone: so no more than one
gathered X or dX, one W or dW, and dY are alive at once.

Parts of features ([T,K''] where X is `sharded-features`) travel as rows of the transpose, and the products read and
write the transpose where it lies: the only copies are those of this rank's own part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.overlap import pieces
from shardwright.overlap.pieces import TokenPiece
from shardwright.overlap.product import Product
from shardwright.overlap.work import Backward, Forward
from shardwright.runtime.reduction import lease_partial, transposed


def forward(work: Forward) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(Y_i [T,N'_i], what backward needs of X or None).

    Where k is split, Y_i is leased as ``unreduced`` and lacks its bias: the reduction that follows ends the lease.
    """
    product = work.product
    x = gather(product, work.x, work.rows, work.width) if product.gather_x.size > 1 else work.x
    weights, biases = work.lease()
    outputs = [new_output(product, work.rows, x, weight) for weight in weights]
    for piece in cut(product, work.rows):
        pieces.multiply(x[piece.rows], weights, biases, outputs, piece.rows, product.resolved.feature_chunks)
    return outputs, settle_x(work, x)


def backward(work: Backward) -> torch.Tensor | None:
    """dX [R,K''] or None; dW_i and db_i go into the store."""
    product = work.product
    x = None if product.gathers_w else x_again(work)
    dx = None
    if work.needs_x and work.present:
        dx = input_gradient(work)
        work.release()
        dx = reduce_input_gradient(product, dx)
    if product.gathers_w:
        x = x_again(work)
    if work.into is not None:
        if product.layout.chunks:
            for piece in cut(product, rows_of_products(work)):
                work.into.add(rows_of(work.grads, piece), x[piece.rows] if x is not None else None)
            work.into.finish()
        else:
            work.into.all_at_once(work.grads, x)
    end_inputs(work, x)
    return dx


def end_inputs(work: Backward, x: torch.Tensor | None) -> None:
    """Gives back the memory of every dY_i, and of an X that was gathered for this backward."""
    for grad in work.present:
        work.product.runtime.arena.end(grad)
    if x is not None and x is not work.kept:
        work.product.runtime.arena.end(x)


def cut(product: Product, rows: int) -> list[TokenPiece]:
    """The pieces of tokens that products are cut into; one where the layout states no chunks."""
    if not product.layout.chunks:
        return pieces.whole(rows)
    return pieces.cut_tokens(rows, product.tokens_group, product.layout.chunks)


def rows_of(grads: Sequence[torch.Tensor | None], piece: TokenPiece) -> list[torch.Tensor | None]:
    """Those rows of every dY_i."""
    return [None if grad is None else grad[piece.rows] for grad in grads]


def rows_of_products(work: Backward) -> int:
    """T, or 0 where no gradient came."""
    return max((grad.shape[0] for grad in work.present), default=0)


def x_again(work: Backward) -> torch.Tensor | None:
    """The X that dW needs [T,K']: kept, left by a replay, or gathered again."""
    if work.held is not None:
        return work.held
    if work.kept is not None and work.gathers_again:
        return gather(work.product, work.kept, work.rows, work.width)
    return work.kept


def gather(product: Product, x: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """X [R,K''] of every rank → [rows,width], leased."""
    if product.x_by_features:
        whole = lease_x(product, x, width, rows)
        all_gather(transposed(x), whole, product.gather_x, product.name)
        return whole.t()
    whole = lease_x(product, x, rows, width)
    all_gather(x, whole, product.gather_x, product.name)
    return whole


def lease_x(product: Product, x: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Room for the gathered X [rows,width]."""
    return product.runtime.arena.lease((rows, width), x.dtype, x.device, "gathered", f"{product.name} (X)")


def settle_x(work: Forward, gathered: torch.Tensor) -> torch.Tensor | None:
    """What backward keeps of X: the gathered tensor, what came in, or nothing. Ends the lease of what nobody keeps."""
    arena = work.product.runtime.arena
    if work.keep and work.product.keep_gathered:
        return arena.give(gathered)
    if work.keep and work.hold is not None and gathered is not work.x:
        work.hold(gathered)
    else:
        arena.end(gathered)
    return work.x if work.keep else None


def new_output(product: Product, rows: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Room for Y_i [rows,N'_i]: leased where it is still to be reduced."""
    shape = (rows, weight.shape[0])
    if product.splits_k:
        scatters = product.y_by_features and product.scatter_y.size > 1
        return lease_partial(product.runtime, shape, x, f"{product.name} (Y)", scatters)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def input_gradient(work: Backward) -> torch.Tensor:
    """dX [T,K'] of this rank's part of N: leased where it is still to be reduced."""
    weights, dx = work.lease(), new_input_gradient(work)
    for piece in cut(work.product, dx.shape[0]):
        pieces.input_gradient(rows_of(work.grads, piece), weights, dx[piece.rows])
    return dx


def new_input_gradient(work: Backward) -> torch.Tensor:
    """Room for dX [T,K']."""
    product, (grad, *_) = work.product, work.present
    shape = (grad.shape[0], work.width)
    if product.gather_x.size == 1 and product.reduce_dx.size == 1:
        return torch.empty(shape, dtype=grad.dtype, device=grad.device)
    scatters = product.x_by_features and product.gather_x.size > 1
    return lease_partial(product.runtime, shape, grad, f"{product.name} (dX)", scatters)


def new_part(product: Product, dx: torch.Tensor) -> torch.Tensor:
    """Room for this rank's part of dX [T,K']."""
    return dx.new_empty(product.shape_in(*dx.shape))


def reduce_input_gradient(product: Product, dx: torch.Tensor) -> torch.Tensor:
    """dX [T,K'], partial over n → this rank's part [R,K''], summed over all of n."""
    if product.gather_x.size > 1:
        if product.x_by_features:
            columns = dx.new_empty(product.shape_in(*dx.shape)[::-1])
            reduce_scatter(dx.t(), columns, product.gather_x, product.name, product.wide)
            part = transposed(columns)
        else:
            part = new_part(product, dx)
            reduce_scatter(dx, part, product.gather_x, product.name, product.wide)
        product.runtime.arena.end(dx)
        dx = part
    if product.reduce_dx.size > 1:
        all_reduce(dx, product.reduce_dx, product.name, product.wide)
        product.runtime.arena.give(dx)
    return dx
