"""The volume of one site's products: collectives, bytes sent, bytes saved and transients, as pure formulas.

As this rank sees a site, T rows are multiplied; K', N'_i are the local features, e the bytes of an element. X comes in
parts of its rows, or of its features, where the layout gathers it; Y_i goes so where it is reduce-scattered; W_i is
stored in parts of its rows where it is gathered. Parts are ⌈L/n⌉ of L, on the last ranks less.

    A    X as it comes         a = T·K'·e      X gathered, dX unreduced
    B_i  W_i as it is stored   b_i = N'_i·K'·e W_i gathered, dW_i unreduced
    C_i  Y_i as it goes        c_i = T·N'_i·e  Y_i unreduced, dY_i gathered

What this rank sends for a tensor of F bytes over n ranks, p of them its part (comm/exchange.py; where n divides, these
are THEORY's (1−1/n)·F and 2(1−1/n)·F); a group of one rank makes no collective:

| kind           | sent                                                                        |
|----------------|-----------------------------------------------------------------------------|
| all_gather     | (n−1)·p; as a ring all but the next rank's part, which that rank has already |
| reduce_scatter | F − p                                                                       |
| all_reduce     | ⌊2·(n−1)·F/n⌋                                                               |

sizes.py works the letters out for a rank; transients.py tells what is alive at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.formulas.place import Here, Moves
from shardwright.formulas.sizes import Sizes
from shardwright.formulas.storing import Storing
from shardwright.formulas.transients import transient_backward, transient_forward
from shardwright.spec.layout import GridLayout
from shardwright.spec.site import Site


@dataclass(frozen=True)
class Volume:
    """What one forward and one backward of a site move and keep on one rank, in bytes.

    forward, backward: collectives in issue order, the store's all-reduces of dW and db among them.
    saved: held by the graph between the passes, parameters excluded (``trace.saved_bytes``).
    transient_forward, transient_backward: the most alive at once beyond the site's inputs, outputs, parameters and
        gradients; an X that is saved gathered counts.
    """

    forward: Moves
    backward: Moves
    saved: int
    transient_forward: int
    transient_backward: int

    @property
    def sent(self) -> int:
        """What this rank sends in both passes."""
        return sum(move.sent for move in self.forward + self.backward)


def site_volume(
    site: Site,
    layout: GridLayout,
    sizes: Mapping[str, int],
    place: Mapping[str, int],
    *,
    element: int,
    bias: bool | Sequence[bool] = False,
    frozen: Collection[str] = (),
    backend: str = "gloo",
) -> Volume:
    """The volume of ``site`` under ``layout`` on the rank at ``place`` of a mesh of ``sizes`` (in mesh order).

    site: M tokens of the micro-batch over the whole mesh, K, and the linears. element: bytes an element. bias: whether
    the linears have one, or one answer each. frozen: of ``x``, ``w``, ``b`` (every linear's) and ``w0``, ``b1``, …
    (one's) those that want no gradient. backend: the declared one, by which algorithms (and their scratch) are chosen.

    The order of backward is the engine's where all dY_i arrive together: what follows the node comes last linear first.
    """
    product = Sizes.of(site, layout, Here(sizes, place), element, bias, frozen, backend)
    return Volume(
        forward=_moves_forward(product),
        backward=_moves_backward(product),
        saved=_saved(product),
        transient_forward=transient_forward(product),
        transient_backward=transient_backward(product, _backward(product)),
    )


# -- collectives -------------------------------------------------------------------------------------------------------


def _moves_forward(p: Sizes) -> Moves:
    """Every W_i gathered: Σb_i. X gathered: a. Each Y_i reduce-scattered, all-reduced, or both. (site_product.py)"""
    moves = p.gather_w + p.gather_x.gather(p.whole_x, p.x, p.next_rows * p.x_row if p.travels else None)
    scatters = [p.scatter_y.scatter(p.c(out), p.own_y(out)) for out in p.outs]
    reduces = [p.reduce_y.reduce(p.own_y(out)) for out in p.outs]
    if p.resolved.deferred:  # every Y_i is scattered before the first is all-reduced
        return sum(scatters + reduces, moves)
    return sum((a + b for a, b in zip(scatters, reduces, strict=True)), moves)


def _moves_backward(p: Sizes) -> Moves:
    """db_i of outer biases; W_i gathered again, dY_i gathered: c_i; X gathered again: a; dX: a; dW_i and other db_i."""
    return _backward(p).end()


def _backward(p: Sizes) -> Storing:
    """One backward, up to the last use of each parameter; the store's reductions take their places in it."""
    storing = Storing(p.units)
    gather_w = p.gather_w if p.reads_w and not p.keeps_w and p.differentiates else Moves()
    for i, out in reversed(list(enumerate(p.outs))):
        if p.outer and p.has_bias[i] and (p.differentiates or out.trains_b):
            storing.finish(*p.place_of_bias(i))
        if p.scatter_y.size > 1 and p.differentiates and not p.resolved.deferred:
            storing.add(gather_w + p.scatter_y.gather(p.c(out), p.own_y(out)))
            gather_w = Moves()
    storing.add(gather_w)
    if not p.differentiates:
        return storing
    if p.resolved.deferred:
        around = p.resolved.travels and p.resolved.streamed
        for out in p.outs:
            storing.add(p.scatter_y.gather(p.c(out), p.own_y(out), p.next_rows * out.row if around else None))
    storing.add(_moves_of_x(p))
    storing.form()
    for i in range(len(p.outs)):
        storing.finish(*p.place_of_weight(i))
        if p.has_bias[i] and not p.outer:
            storing.finish(*p.place_of_bias(i))
    return storing


def _moves_of_x(p: Sizes) -> Moves:
    """X gathered again, dX scattered and reduced, in the order of the mode."""
    again, scattered, reduced = Moves(), Moves(), Moves()
    if p.trains_w and not p.keeps:
        again = p.gather_x.gather(p.whole_x, p.x, p.next_rows * p.x_row if p.travels else None)
    if p.needs_x:
        scattered, reduced = p.gather_x.scatter(p.whole_x, p.x), p.reduce_dx.reduce(p.x)
    if p.travels:  # the ring lets the sum of dX start first
        return scattered + again + reduced
    return scattered + reduced + again if p.resolved.x_blocks and p.gathers_w else again + scattered + reduced


# -- bytes kept --------------------------------------------------------------------------------------------------------


def _saved(p: Sizes) -> int:
    """a where the gathered X is kept, else A; nothing where no W is trained."""
    if not p.trains_w:
        return 0
    return p.whole_x if p.keeps else p.x
