"""The ring mode: pieces travel around the axis, so that neither a gathered operand nor an unreduced result ever exists.

Same signature as blocking.py. Transients, in pieces of 1/(n·chunks) of the operand (ring_collectives.py):

| site   | pass     | travels                   | alive at a time   |
|--------|----------|---------------------------|-------------------|
| column | forward  | X                         | 2 of X            |
| column | backward | X for dW; dX being summed | 2 of X, 2 of dX   |
| row    | forward  | Y being summed            | 2 of Y            |
| row    | backward | dY                        | 2 of dY           |

A site that does both (gathers X and scatters Y) moves X and dX so; Y and dY travel as in async: a feature chunk of Y's
features beside what is left of the product of the last piece of X, dY beside the first products that read it.

Where X is kept gathered it is gathered as async does it; where X is whole on the n axes nothing can travel but dX,
which is all-reduced as async does it.
"""

from __future__ import annotations

import torch

from shardwright.comm.collectives import all_reduce
from shardwright.overlap import asynchronous, blocking, pieces
from shardwright.overlap.feature_chunks import FeatureChunks
from shardwright.overlap.pieces import TokenPiece
from shardwright.overlap.ring_collectives import RingAllGather, RingReduceScatter, multiply_back, reduced_products
from shardwright.overlap.work import Backward, Forward

MODE = "ring"


def forward(work: Forward) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As blocking.forward."""
    product = work.product
    if product.gather_x.size == 1 or product.x_by_features or (work.keep and product.keep_gathered):
        return asynchronous.forward(work)
    ring_all_gather = RingAllGather(work.x, work.rows, product, product.gather_x, product.resolved.chunks, MODE, "X")
    weights, biases = work.lease()
    outputs = [blocking.new_output(product, work.rows, work.x, weight) for weight in weights]
    for piece in ring_all_gather.turns:
        pieces.multiply(ring_all_gather.take(), weights, biases, outputs, piece.rows)
        ring_all_gather.pass_on()
    ring_all_gather.end()
    return outputs, work.x if work.keep else None


def backward(work: Backward) -> torch.Tensor | None:
    """As blocking.backward."""
    product = work.product
    if product.gather_x.size == 1 or product.x_by_features:
        return asynchronous.backward(work)
    group, chunks = product.gather_x, product.resolved.chunks
    work, arriving = asynchronous.gather_dy(work, MODE)
    dx, total, ring_all_gather = None, None, None

    def rows_of(piece: TokenPiece) -> list[torch.Tensor | None]:
        for arrival in arriving:
            arrival.wait_rows(piece.rows)
        return blocking.rows_of(work.grads, piece)

    if work.needs_x and work.present:
        weights = work.lease()
        start, stop = group.bounds(work.rows)
        dx = work.present[0].new_empty(stop - start, work.width)

        def share(piece: TokenPiece, out: torch.Tensor) -> None:
            pieces.input_gradient(rows_of(piece), weights, out)

        total = RingReduceScatter(dx, work.rows, product, group, chunks, MODE, "dX", share)
    if work.kept is not None and not product.keep_gathered:
        ring_all_gather = RingAllGather(work.kept, work.rows, product, group, chunks, MODE, "X")
    for piece in pieces.cut_tokens(work.rows, group, chunks):
        taken = (
            ring_all_gather.take()
            if ring_all_gather is not None
            else None
            if work.kept is None
            else work.kept[piece.rows]
        )
        if work.into is not None:
            work.into.add(rows_of(piece), taken)
        if total is not None:
            total.step()
        if ring_all_gather is not None:
            ring_all_gather.pass_on()
    work.release()
    for travelling in (total, ring_all_gather):
        if travelling is not None:
            travelling.end()
    for arrival in arriving:
        arrival.finish()
    if dx is not None:
        all_reduce(dx, product.reduce_dx, product.name, product.wide)
    if work.into is not None:
        work.into.finish()
    for grad in work.present:
        product.runtime.arena.end(grad)
    return dx


def reduced(work: Forward) -> list[torch.Tensor]:
    """Y_i [S,N'_i] = this rank's rows of Σ_ranks X W_iᵀ, X [R,K'] as it came."""
    product = work.product
    if product.resolved.streamed:
        return reduced_products(work, product.resolved.chunks, MODE)
    if product.gather_x.size == 1:
        return asynchronous.reduced(work)
    ring_all_gather = RingAllGather(work.x, work.rows, product, product.gather_x, product.resolved.chunks, MODE, "X")
    y = FeatureChunks(work, MODE)
    *early, last = ring_all_gather.turns
    for piece in early:
        x = ring_all_gather.take()
        for feature_chunk in y.feature_chunks:
            y.multiply(feature_chunk, x, piece)
        ring_all_gather.pass_on()
    x = ring_all_gather.take()
    for feature_chunk in y.feature_chunks:
        y.multiply(feature_chunk, x, last)
        y.send(feature_chunk)
    ring_all_gather.pass_on()
    ring_all_gather.end()
    return y.finish()


def gathered_backward(work: Backward) -> torch.Tensor | None:
    """dX [T,K'] and dW of a row site from this rank's rows dY_i [T/n,N_i], which travel around."""
    product = work.product
    ring_all_gathers = [
        None
        if grad is None
        else RingAllGather(grad, work.rows, product, product.scatter_y, product.resolved.chunks, MODE, "dY")
        for grad in work.grads
    ]
    weights, dx = asynchronous.weights_and_room(work)
    for piece in pieces.cut_tokens(work.rows, product.scatter_y, product.resolved.chunks):
        taken = [None if ring_all_gather is None else ring_all_gather.take() for ring_all_gather in ring_all_gathers]
        multiply_back(taken, work, piece, weights, dx)
        for ring_all_gather in ring_all_gathers:
            if ring_all_gather is not None:
                ring_all_gather.pass_on()
    work.release()
    for ring_all_gather in ring_all_gathers:
        if ring_all_gather is not None:
            ring_all_gather.end()
    if work.into is not None:
        work.into.finish()
    return dx
