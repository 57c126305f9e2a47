"""The volume of one site's products: collectives, bytes sent, bytes saved and transients, as pure formulas.

As this rank sees a site, T rows are multiplied. R of them come in where X is held in parts over n ranks, S go out where
Y is reduce-scattered: ⌈T/n⌉, on the last ranks less. K', N'_i are the local features, e the bytes of an element:

    A = R·K'·e  X as it comes     a = T·K'·e  X gathered, dX unreduced
    C_i = S·N'_i·e  Y_i as it goes    c_i = T·N'_i·e  Y_i unreduced, dY_i gathered

What this rank sends for a tensor of F bytes over n ranks, p of them its part (comm/exchange.py; where n divides, these
are THEORY's (1−1/n)·F and 2(1−1/n)·F); a group of one rank makes no collective:

| kind           | sent                                                                        |
|----------------|-----------------------------------------------------------------------------|
| all_gather     | (n−1)·p; as a ring all but the next rank's part, which that rank has already |
| reduce_scatter | F − p                                                                       |
| all_reduce     | ⌊2·(n−1)·F/n⌋                                                               |

A transient is the most alive at once beyond X, Y_i, W_i, b_i and their gradients. In a ring, pieces of ⌈⌈T/n⌉/chunks⌉
rows are alive, two at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.layout import GridLayout
from shardwright.mesh import chunk
from shardwright.site import Linear, Site


@dataclass(frozen=True)
class Move:
    """One logical collective, as ``trace.collectives`` logs it; size: bytes of the full tensor, sent: by this rank."""

    kind: str
    axes: tuple[str, ...]
    size: int
    sent: int


Moves = tuple[Move, ...]


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
    product = _Product.of(site, layout, _Here(sizes, place), element, bias, frozen, backend)
    return Volume(
        forward=_moves_forward(product),
        backward=_moves_backward(product),
        saved=_saved(product),
        transient_forward=_transient_forward(product),
        transient_backward=_transient_backward(product),
    )


# -- collectives -------------------------------------------------------------------------------------------------------


def _moves_forward(p: _Product) -> Moves:
    """X gathered: a. Each Y_i reduce-scattered or all-reduced: c_i. (linear/site_product.py)"""
    moves = p.gather_x.gather(p.whole_x, p.x, p.next_rows * p.x_row if p.travels else None)
    for out in p.outs:
        moves += p.reduce_y.scatter(p.c(out), p.own_y(out)) if p.scatters else p.reduce_y.reduce(p.c(out))
    return moves


def _moves_backward(p: _Product) -> Moves:
    """db_i where b follows the reduction; dY_i gathered: c_i; X gathered again: a; dX: a; dW_i, and other db_i."""
    after, gathers, moves = Moves(), Moves(), Moves()
    for out in reversed(p.outs):
        if p.outer and out.trains_b:
            after += out.over_b.reduce(out.db)
        if p.scatters and p.differentiates and not p.defers:
            after += p.reduce_y.gather(p.c(out), p.own_y(out))
    if p.defers and p.differentiates:
        for out in p.outs:
            gathers += p.reduce_y.gather(p.c(out), p.own_y(out), p.next_rows * out.row if p.ring else None)
    again = Moves()
    if p.trains_w and not p.keeps:
        again = p.gather_x.gather(p.whole_x, p.x, p.next_rows * p.x_row if p.travels else None)
    if p.needs_x:
        moves = p.gather_x.scatter(p.whole_x, p.x) + p.reduce_dx.reduce(p.whole_x)
    moves = moves + again if p.travels else again + moves  # the ring lets the sum of dX start first
    for out in p.outs:
        if out.trains_w:
            moves += out.over_w.reduce(out.dw)
        if out.trains_b and not p.outer:
            moves += out.over_b.reduce(out.db)
    return after + gathers + moves


# -- bytes kept --------------------------------------------------------------------------------------------------------


def _saved(p: _Product) -> int:
    """a where the gathered X is kept, else A; nothing where no W is trained."""
    if not p.trains_w:
        return 0
    return p.whole_x if p.keeps else p.x


def _transient_forward(p: _Product) -> int:
    """X gathered (a, or a ring's pieces) beside Σc_i; then, X gone unless kept, each reduction of a Y_i.

    A deferred product has no c_i, but sums that travel. (Its stand-ins own an element where there is no X, in backward
    where there is no dY_i, to stand on.)
    """
    if p.defers:
        most = spare = 0
        for out in p.outs:
            two, after = p.running_sum(p.reduce_y, out.row)
            most = max(most, spare + two + after)  # the room of the sum before goes when this one has its own
            spare = after
        return most + (0 if p.x else len(p.outs) * p.element)
    gathered = p.carousel(p.x_row) if p.travels else p.whole_x if p.gather_x.size > 1 else 0
    left = sum(p.c(out) for out in p.outs) if p.scatters else 0
    most, kept = gathered + left, gathered if p.keeps else 0
    for out in p.outs:
        scratch = (
            p.scatter_scratch(p.own_y(out), p.c(out), p.reduce_y)
            if p.scatters
            else p.reduce_scratch(p.c(out), p.reduce_y)
        )
        most = max(most, kept + left + scratch)
        left -= p.c(out) if p.scatters else 0
    return most


def _transient_backward(p: _Product) -> int:
    """Σc_i (dY gathered), X gathered (a), dX unreduced (a) and its reduction's scratch; a ring's pieces instead.

    Beside them, or after dX where the mode is blocking: what accumulates for the store, and a piece's share of a db_i.
    """
    if not p.differentiates:
        return 0
    if p.defers:
        grads = (p.carousel(out.row) if p.ring else p.c(out) for out in p.outs)
        return sum(grads) + sum(p.element for out in p.outs if not p.own_y(out))
    always = sum(p.c(out) for out in p.outs) if p.scatters else 0
    if p.gather_x.size > 1 and p.trains_w:
        always += p.carousel(p.x_row) if p.travels else p.whole_x
    dx, meanwhile = 0, 0
    if p.needs_x and p.gather_x.size > 1:
        dx = (
            sum(p.running_sum(p.gather_x, p.x_row))
            if p.ring
            else p.whole_x + p.scatter_scratch(p.x, p.whole_x, p.gather_x)
        )
        meanwhile = 0 if p.layout.overlap == "blocking" else dx
    elif p.needs_x:
        dx = p.reduce_scratch(p.whole_x, p.reduce_dx)
    return always + max(dx, meanwhile + _accumulating(p))


def _accumulating(p: _Product) -> int:
    """While dW and db form: gradients of shared heads before they are laid into the shard; a piece's share of a db_i.

    One linear's at a time where nothing is cut, else all linears' until the last piece is done (linear/pieces.py).
    """
    windows = [out.used_dw * out.trains_w + out.used_db * out.trains_b for out in p.outs if out.window]
    if p.layout.overlap == "blocking" and not p.layout.chunks:
        return max(windows, default=0)
    shares = [out.used_db for out in p.outs if out.trains_b and not p.outer]
    return sum(windows) + (max(shares, default=0) if p.pieces > 1 else 0)


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Here:
    """A rank's place on the mesh."""

    sizes: Mapping[str, int]
    place: Mapping[str, int]

    def group(self, axes: Collection[str]) -> _Group:
        """The ranks along ``axes``; its axes and its order are the mesh's (comm/groups.py)."""
        ordered = tuple(axis for axis in self.sizes if axis in axes)
        index = 0
        for axis in ordered:
            index = index * self.sizes[axis] + self.place[axis]
        return _Group(ordered, math.prod(self.sizes[axis] for axis in ordered), index)

    def cut(self, length: int, axes: Collection[str]) -> int:
        """What this rank holds of ``length``, cut axis after axis in mesh order (params/shard.py)."""
        for axis in self.sizes:
            if axis in axes:
                start, stop = chunk(length, self.sizes[axis], self.place[axis])
                length = stop - start
        return length


@dataclass(frozen=True)
class _Group:
    axes: tuple[str, ...]
    size: int
    index: int

    def part(self, rows: int, ahead: int = 0) -> int:
        """The rows, of ``rows``, of this rank or of the one that many places ahead."""
        start, stop = chunk(rows, self.size, (self.index + ahead) % self.size)
        return stop - start

    def gather(self, whole: int, own: int, following: int | None = None) -> Moves:
        """An all-gather of ``whole`` bytes, ``own`` of them from here; following: the next rank's part, in a ring."""
        sent = own * (self.size - 1) if following is None else whole - following
        return self._move("all_gather", whole, sent)

    def scatter(self, whole: int, own: int) -> Moves:
        """A reduce-scatter of ``whole`` bytes, ``own`` of them for here."""
        return self._move("reduce_scatter", whole, whole - own)

    def reduce(self, whole: int) -> Moves:
        """An all-reduce of ``whole`` bytes."""
        return self._move("all_reduce", whole, 2 * whole * (self.size - 1) // self.size)

    def _move(self, kind: str, size: int, sent: int) -> Moves:
        return (Move(kind, self.axes, size, sent),) if self.size > 1 else ()


@dataclass(frozen=True)
class _Out:
    """One linear: bytes of a row of Y_i, of dW and db as stored and as the product makes them, and what is trained.

    window: the product reads some rows of the shard only (shared heads). over_w, over_b: where dW and db are partial.
    """

    row: int
    dw: int
    db: int
    used_dw: int
    used_db: int
    window: bool
    trains_w: bool
    trains_b: bool
    over_w: _Group
    over_b: _Group


@dataclass(frozen=True)
class _Product:
    """A site's products on this rank: T = ``rows``, bytes of a row of X, and the groups of linear/product.py."""

    layout: GridLayout
    gather_x: _Group
    reduce_dx: _Group
    reduce_y: _Group
    rows: int
    x_row: int
    outs: tuple[_Out, ...]
    needs_x: bool
    element: int
    backend: str

    @classmethod
    def of(
        cls,
        site: Site,
        layout: GridLayout,
        here: _Here,
        element: int,
        bias: bool | Sequence[bool],
        frozen: Collection[str],
        backend: str,
    ) -> _Product:
        """Works out the local sizes; where gradients are partial is linear/grid_linear.py's rule."""
        width = here.cut(site.k, layout.k) * element
        over_b = layout.output_token_axes if layout.k else layout.m
        outs = []
        for i, linear in enumerate(site.linears):
            n, held, over_n = _features(linear, layout, here)
            has_bias = bias if isinstance(bias, bool) else bias[i]
            outs.append(
                _Out(
                    row=n * element,
                    dw=held * width,
                    db=held * element,
                    used_dw=n * width,
                    used_db=n * element,
                    window=bool(over_n),
                    trains_w=not {"w", f"w{i}"} & set(frozen),
                    trains_b=has_bias and not {"b", f"b{i}"} & set(frozen),
                    over_w=here.group(layout.m + over_n),
                    over_b=here.group(over_b + over_n),
                )
            )
        return cls(
            layout=layout,
            gather_x=here.group(layout.axes_where("x", "sharded")),
            reduce_dx=here.group(layout.axes_where("x", "replicated")),
            reduce_y=here.group(layout.k),
            rows=here.cut(site.m, layout.m),
            x_row=width,
            outs=tuple(outs),
            needs_x="x" not in frozen,
            element=element,
            backend=backend,
        )

    # a, A, c_i, C_i

    @property
    def whole_x(self) -> int:
        """a."""
        return self.rows * self.x_row

    @property
    def x(self) -> int:
        """A."""
        return self.gather_x.part(self.rows) * self.x_row

    def c(self, out: _Out) -> int:
        """c_i."""
        return self.rows * out.row

    def own_y(self, out: _Out) -> int:
        """C_i."""
        return (self.reduce_y.part(self.rows) if self.scatters else self.rows) * out.row

    # what the layout makes of them (linear/product.py)

    @property
    def trains_w(self) -> bool:
        """Some dW is wanted, so X is saved."""
        return any(out.trains_w for out in self.outs)

    @property
    def differentiates(self) -> bool:
        """The site's node runs in backward."""
        return self.needs_x or self.trains_w or (not self.outer and any(out.trains_b for out in self.outs))

    @property
    def keeps(self) -> bool:
        """Backward keeps the gathered X."""
        return self.layout.save_x == "gathered" and self.trains_w

    @property
    def outer(self) -> bool:
        """The bias is added after the reduction of Y, by a node of its own."""
        return self.reduce_y.size > 1

    @property
    def scatters(self) -> bool:
        """Y is reduce-scattered."""
        return self.reduce_y.size > 1 and self.layout.word("y", self.layout.k[0]) == "sharded"

    @property
    def ring(self) -> bool:
        """The mode is ring."""
        return self.layout.overlap == "ring"

    @property
    def travels(self) -> bool:
        """X goes around in pieces and is never whole."""
        return self.ring and self.gather_x.size > 1 and not self.keeps

    @property
    def defers(self) -> bool:
        """The product of a row site is formed piece by piece by the node that reduces it."""
        alone = self.gather_x.size == 1 and self.reduce_dx.size == 1 and self.layout.reduce_dtype == "same"
        return self.layout.overlap != "blocking" and self.scatters and alone

    @property
    def tokens(self) -> _Group:
        """The ranks among which tokens are cut into pieces."""
        return self.gather_x if self.gather_x.size > 1 else self.reduce_y

    @property
    def next_rows(self) -> int:
        """The next rank's part of T."""
        return self.tokens.part(self.rows, 1)

    # pieces (linear/pieces.py, linear/carousel.py)

    @property
    def chunks(self) -> int:
        """Pieces of each rank's part; a ring of two ranks has two where the layout leaves it open."""
        return self.layout.chunks or (2 if self.ring and self.tokens.size == 2 else 1)

    @property
    def pieces(self) -> int:
        """Into how many pieces dW and db are summed up, where they are cut at all."""
        return (self.tokens.size if self.gather_x.size > 1 or self.scatters else 1) * self.chunks

    @property
    def _largest(self) -> int:
        _, part = chunk(self.rows, self.tokens.size, 0)
        return chunk(part, self.chunks, 0)[1]

    def carousel(self, row: int) -> int:
        """Buffers for pieces of ``row`` bytes a row that come by: two, or one where only one ever comes."""
        return (2 if self.tokens.size * self.chunks > 2 else 1) * self._largest * row

    def running_sum(self, group: _Group, row: int) -> tuple[int, int]:
        """Two buffers for sums that travel; and room for a share, where the result has none left (uneven parts)."""
        own = group.part(self.rows)
        fits = True
        for sub in range(self.chunks):
            pieces = [chunk(group.part(self.rows, ahead), self.chunks, sub) for ahead in range(group.size)]
            fits = fits and max(stop - start for start, stop in pieces) <= own - pieces[0][0]
        piece = self._largest * row
        return 2 * piece, 0 if fits else piece

    # scratch (comm/exchange.py, comm/collectives.py)

    @property
    def wide(self) -> bool:
        """Low-precision sums are taken in fp32."""
        return self.layout.reduce_dtype == "float32" and self.element == 2

    def scatter_scratch(self, own: int, whole: int, group: _Group) -> int:
        """A reduce-scatter's, beside its result of ``own`` bytes: the sum in fp32 where wide, and parts that arrive.

        Two parts at most: all but the own one arrive, and where not wide the first of them lands in the result.
        """
        if self.backend == "nccl":
            return (own + whole) * 4 // self.element if self.wide else 0
        if self.wide:
            return own * 4 // self.element + own * min(2, group.size - 1)
        return own * min(2, group.size - 2)

    def reduce_scratch(self, whole: int, group: _Group) -> int:
        """An all-reduce's: none; where wide it is a reduce-scatter into a part and a gather."""
        if not self.wide or group.size == 1:
            return 0
        own = group.part(whole // self.element) * self.element
        return own + self.scatter_scratch(own, whole, group)


def _features(linear: Linear, layout: GridLayout, here: _Here) -> tuple[int, int, tuple[str, ...]]:
    """Of one linear: N' that the product reads, N' that the shard holds, and the n axes over which dW is partial.

    Units that are fewer than the ranks (key/value heads) are held whole by all, and each rank reads one of them.
    """
    split = here.group(layout.n)
    if linear.sharable and split.size > 1 and linear.units % split.size:
        return linear.unit, linear.n, layout.n
    groups = linear.groups if split.size > 1 else 1
    n = groups * here.cut(linear.n // groups, layout.n)
    return n, n, ()
