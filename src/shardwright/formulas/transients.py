"""The transients of a site: the most bytes alive at once beyond X, Y_i, W_i, b_i and their gradients, as stored.

Letters are volume.py's. In a ring, pieces of ⌈⌈T/n⌉/chunks⌉ rows are alive, two at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.formulas.sizes import Sizes
from shardwright.formulas.storing import Storing


def transient_forward(p: Sizes) -> int:
    """W (Σb_i) beside X gathered (a, or a ring's pieces) beside Σc_i; then, W and X gone unless kept, each reduction.

    A row's deferred product has no c_i, but sums that travel. (The stand-ins of what is deferred own an element where
    there is no X, in backward where there is no dY_i, to stand on.) Y in feature chunks: _feature_chunks.
    """
    stand_ins = len(p.outs) * p.element if p.resolved.deferred and not p.x else 0
    if p.resolved.streamed:
        most = spare = 0
        for out in p.outs:
            two, after = p.ring_reduce_scatter(p.scatter_y, out.row)
            most = max(most, spare + two + after)  # the room of the sum before goes when this one has its own
            spare = after
        return most + p.whole_w + stand_ins
    gathered = p.ring_all_gather(p.x_row) if p.travels else p.whole_x if p.gather_x.size > 1 else 0
    if p.resolved.deferred:
        reduced = max(p.reduce_scratch(p.own_y(out), p.reduce_y) for out in p.outs)
        return p.whole_w + max(gathered + _feature_chunks(p), reduced) + stand_ins
    left = sum(p.c(out) for out in p.outs) if p.scatter_y.size > 1 else 0
    most = p.whole_w + gathered + max(left, p.packed_x)
    kept = (gathered if p.keeps else 0) + (p.whole_w if p.keeps_w else 0)
    for out in p.outs:
        if p.scatter_y.size > 1:
            scratch = p.scatter_scratch(p.own_y(out), p.c(out), p.scatter_y)
            most = max(most, kept + left + scratch + p.packed_y(out))
            left -= p.c(out)
        most = max(most, kept + left + p.reduce_scratch(p.own_y(out), p.reduce_y))
    return most


def _feature_chunks(p: Sizes) -> int:
    """The most of Y alive beside W and X: feature chunks [T,w] formed or forming, and with the one that travels its
    landing.

    Where X is gathered every feature chunk is begun with the first rows of X that are there: Σc_i; else two are alive.
    """
    row, own = p.rows * p.element, p.scatter_y.part(p.rows) * p.element  # of one feature
    feature_chunks = [
        (stop - start, stop - start == out.n) for out in p.outs for start, stop in p.feature_chunks_of(out)
    ]
    at_once = p.gather_x.size > 1
    alive = sum(width * row for width, _ in feature_chunks) if at_once else 0
    most = before = landing = 0
    for width, is_whole in feature_chunks:
        alive += 0 if at_once else width * row
        most = max(most, alive + landing)  # the product of this feature chunk, while the one before travels
        landing = p.scatter_scratch(width * own, width * row, p.scatter_y) + (0 if is_whole else width * own)
        alive, before = alive - before, width * row
        most = max(most, alive + landing)
    return most


def transient_backward(p: Sizes, storing: Storing) -> int:
    """dY gathered (Σc_i), W (Σb_i), dX unreduced (a) and its reduction's scratch, X gathered (a), dW unreduced (Σb_i).

    Blocking: W goes before dX is reduced; where W is gathered, X comes only then. Async: X comes first, dX goes last.
    In a ring, pieces instead, and W stays. Last, all else gone, the dW_i are reduce-scattered.
    """
    if not p.differentiates:
        return 0
    w = p.whole_w if p.reads_w or p.keeps_w else 0
    dw = _WeightGradients.of(p)
    kept = p.whole_x if p.keeps and p.gather_x.size > 1 else 0
    last = kept + storing.most
    stand_ins = sum(p.element for out in p.outs if not p.own_y(out)) if p.resolved.deferred else 0
    if p.resolved.streamed:
        dy = sum(p.ring_all_gather(out.row) if p.resolved.travels else p.c(out) for out in p.outs)
        return max(dy + w + dw.summing, (0 if p.resolved.travels else dy) + dw.giving, last) + stand_ins
    dy, moments = 0, [last]
    for out in reversed(p.outs if p.scatter_y.size > 1 else ()):
        dy += p.c(out)
        moments.append(kept + dy + w + p.packed_y(out))
    dx, scratch, reduced = 0, 0, p.reduce_scratch(p.x, p.reduce_dx) if p.needs_x else 0
    if p.needs_x and p.gather_x.size > 1:
        dx = sum(p.ring_reduce_scatter(p.gather_x, p.x_row)) if p.resolved.x_travels else p.whole_x
        scratch = p.scatter_scratch(p.x, p.whole_x, p.gather_x) + p.packed_x
    x = 0
    if p.gather_x.size > 1 and p.trains_w:
        x = p.ring_all_gather(p.x_row) if p.travels else p.whole_x
    if p.resolved.x_travels:
        return max(*moments, dy + w + x + dx + dw.summing, kept + dy + dw.giving) + stand_ins
    packing = p.packed_x if x and not p.keeps else 0
    later = w if not p.reads_w else 0  # W was kept, and is not read
    if p.resolved.x_blocks:
        before = kept if p.gathers_w else x
        moments += [before + dy + w + (0 if p.gathers_w else packing), before + dy + w + dx]
        moments += [before + dy + later + dx + scratch, before + dy + later + reduced]
        moments += [x + dy + later + packing, x + dy + later + max(dw.summing, dw.giving)]
    else:
        moments += [x + dy + w + dx, x + dy + later + dx + scratch + dw.summing]
        moments += [x + dy + later + reduced + (dw.waiting if dx else 0), x + dy + later + dw.giving]
    return max(moments) + stand_ins


@dataclass(frozen=True)
class _WeightGradients:
    """Of dW and db, what counts as transient: while they are summed up, when all are, and while they go to the store.

    dW whose storage is split is whole until it is reduced: one linear's at a time where nothing is cut, else all
    linears' until the last piece is done (overlap/pieces.py).
    """

    summing: int
    waiting: int
    giving: int

    @classmethod
    def of(cls, p: Sizes) -> _WeightGradients:
        """Those of the site."""
        each = [out.dw if out in p.stored_apart else 0 for out in p.outs]
        cut = not p.resolved.x_blocks or bool(p.layout.chunks)
        shares = [out.db for out in p.outs if out.trains_b and not p.outer]
        share = max(shares, default=0) if p.pieces > 1 else 0
        return cls(sum(each) + share, sum(each), sum(each)) if cut else cls(0, 0, sum(each))
