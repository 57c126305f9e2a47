"""The async mode: collectives run beside the products that do not need them. Same signature as blocking.py.

| site, pass        | what happens, in order                                                           |
|-------------------|----------------------------------------------------------------------------------|
| column, forward   | issue all-gather X · product of the own part · the others as they arrive         |
| column, backward  | issue all-gather X · dX · wait for X · issue reduce-scatter dX · dW · wait       |
| the same, X whole | dX · issue all-reduce dX · dW · wait                                             |
| row, forward      | product of a piece beside the transfer of the one before (ring_collectives.py)   |
| row, backward     | issue all-gather dY · dX and dW of the own part · the others as they arrive      |
| both, forward     | issue all-gather X · product of the own part · the rest in feature chunks: one's |
|                   | reduce-scatter beside the product of the next (feature_chunks.py)                |
| both, backward    | issue all-gathers dY and X · dX as dY arrives · the rest as column               |

On nccl a gather is one launch, so nothing is multiplied before all of it is there, and then as one.
"Both" gathers X and scatters Y; its lines also serve a site that does only the latter but cannot be a row (X is whole
on some axes, Y is all-reduced too, or sums are fp32). Where it keeps X gathered, Y and dY travel blocking.

dW is formed piece by piece, and between pieces an arrival of the reduction is taken in.
Nothing waits between the issue of the reduction of dX and the first piece of dW.
"""

from __future__ import annotations

import dataclasses

import torch

from shardwright.comm.collectives import AllReduceHandle, all_reduce
from shardwright.comm.exchange import AllGatherHandle, ReduceScatterHandle
from shardwright.overlap import blocking, pieces
from shardwright.overlap.feature_chunks import FeatureChunks
from shardwright.overlap.pieces import TokenPiece
from shardwright.overlap.product import Product
from shardwright.overlap.ring_collectives import multiply_back, reduced_products
from shardwright.overlap.work import Backward, Forward

MODE = "async"


def forward(work: Forward) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As blocking.forward."""
    product = work.product
    if product.gather_x.size == 1 or product.x_by_features:
        return blocking.forward(work)
    gathered = blocking.lease_x(product, work.x, work.rows, work.width)
    arrivals = AllGatherHandle(work.x, gathered, product.gather_x, product.name, MODE)
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
    work, arriving = gather_dy(work, MODE)
    x, arrivals = work.held if work.held is not None else work.kept, None
    if work.kept is not None and work.gathers_again:
        x = blocking.lease_x(product, work.kept, work.rows, work.width)
        arrivals = AllGatherHandle(work.kept, x, product.gather_x, product.name, MODE)
    dx, unreduced = None, None
    if work.needs_x and work.present:
        dx = unreduced = input_gradient(work, arriving)
        work.release()
    for gathering in (*arriving, arrivals):
        if gathering is not None:
            gathering.finish()
    reduction: ReduceScatterHandle | AllReduceHandle | None = None
    if dx is not None and unreduced is not None and product.gather_x.size > 1:
        dx = blocking.new_part(product, unreduced)
        reduction = ReduceScatterHandle(unreduced, dx, product.gather_x, product.name, MODE, product.wide)
    elif dx is not None and product.reduce_dx.size > 1:
        reduction = AllReduceHandle(dx, product.reduce_dx, product.name, MODE, product.wide)
    if work.into is not None:
        for piece in cut(product, blocking.rows_of_products(work)):
            work.into.add(blocking.rows_of(work.grads, piece), x[piece.rows] if x is not None else None)
            if isinstance(reduction, ReduceScatterHandle):
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
    blocking.end_inputs(work, x)
    return dx


def cut(product: Product, rows: int) -> list[TokenPiece]:
    """What travels on gloo: one piece a rank at least. On nccl all that is gathered is there at once."""
    if product.tokens_group.backend == "nccl":
        return blocking.cut(product, rows)
    return pieces.cut_tokens(rows, product.tokens_group, product.resolved.chunks)


def reduced(work: Forward) -> list[torch.Tensor]:
    """Y_i [S,N'_i] = this rank's rows of Σ_ranks X W_iᵀ, X [R,K'] as it came."""
    product, x, arrivals = work.product, work.x, None
    if product.resolved.streamed:
        return reduced_products(work, product.resolved.chunks, MODE)
    own: list[TokenPiece] = []
    others = blocking.cut(product, work.rows)
    if product.gather_x.size > 1:
        x = blocking.lease_x(product, work.x, work.rows, work.width)
        arrivals = AllGatherHandle(work.x, x, product.gather_x, product.name, MODE)
        others = cut(product, work.rows)
        if len(others) > 1:  # a single piece is of all ranks
            own = [piece for piece in others if piece.peer == product.gather_x.index]
            others = [piece for piece in others if piece.peer != product.gather_x.index]
    y = FeatureChunks(work, MODE)
    for piece in own:
        for feature_chunk in y.feature_chunks:
            y.multiply(feature_chunk, x[piece.rows], piece)
    for feature_chunk in y.feature_chunks:
        for piece in others:
            if arrivals is not None:
                arrivals.wait(piece.peer)
            y.multiply(feature_chunk, x[piece.rows], piece)
        y.send(feature_chunk)
    if arrivals is not None:
        arrivals.finish()
    blocking.settle_x(work, x)
    return y.finish()


def gather_dy(work: Backward, mode: str) -> tuple[Backward, list[AllGatherHandle]]:
    """The same with dY_i whole, leased, and how they arrive; as it is where dY_i came whole."""
    product = work.product
    if not product.resolved.deferred:
        return work, []
    wholes: list[torch.Tensor | None] = []
    arriving = []
    for grad in work.grads:
        whole = None
        if grad is not None:
            shape, owner = (work.rows, grad.shape[1]), f"{product.name} (dY)"
            whole = product.runtime.arena.lease(shape, grad.dtype, grad.device, "gathered", owner)
            arriving.append(AllGatherHandle(grad, whole, product.scatter_y, product.name, mode))
        wholes.append(whole)
    return dataclasses.replace(work, grads=wholes), arriving


def input_gradient(work: Backward, arriving: list[AllGatherHandle]) -> torch.Tensor:
    """dX [T,K'] of this rank's part of N, as dY arrives."""
    if not arriving:
        return blocking.input_gradient(work)
    weights, dx = work.lease(), blocking.new_input_gradient(work)
    for piece in sorted(cut(work.product, work.rows), key=lambda piece: arriving[0].turn(piece.rows)):
        for arrival in arriving:
            arrival.wait_rows(piece.rows)
        pieces.input_gradient(blocking.rows_of(work.grads, piece), weights, dx[piece.rows])
    return dx


def gathered_backward(work: Backward) -> torch.Tensor | None:
    """dX [T,K'] and dW of a row site from this rank's rows dY_i [T/n,N_i]: gathered, multiplied as they arrive."""
    work, arriving = gather_dy(work, MODE)
    weights, dx = weights_and_room(work)
    for piece in cut(work.product, work.rows):
        for arrival in arriving:
            arrival.wait(piece.peer)
        multiply_back(blocking.rows_of(work.grads, piece), work, piece, weights, dx)
    work.release()
    for arrival in arriving:
        arrival.finish()
    if work.into is not None:
        work.into.finish()
    for grad in work.present:
        work.product.runtime.arena.end(grad)
    return dx


def weights_and_room(work: Backward) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """W_i, and room for a row site's dX [T,K']; nothing where dX is not wanted, or no gradient came."""
    if not (work.needs_x and work.present):
        return [], None
    return work.lease(), work.present[0].new_empty(work.rows, work.width)
