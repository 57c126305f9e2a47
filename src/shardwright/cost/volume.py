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

A transient is the most alive at once beyond X, Y_i, W_i, b_i and their gradients, as they are stored. In a ring, pieces
of ⌈⌈T/n⌉/chunks⌉ rows are alive, two at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost.place import Group, Here, Moves
from shardwright.cost.storing import Stored, Storing
from shardwright.layout import GridLayout
from shardwright.mesh import chunk
from shardwright.site import Linear, Site


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
    product = _Product.of(site, layout, Here(sizes, place), element, bias, frozen, backend)
    return Volume(
        forward=_moves_forward(product),
        backward=_moves_backward(product),
        saved=_saved(product),
        transient_forward=_transient_forward(product),
        transient_backward=_transient_backward(product),
    )


# -- collectives -------------------------------------------------------------------------------------------------------


def _moves_forward(p: _Product) -> Moves:
    """Every W_i gathered: Σb_i. X gathered: a. Each Y_i reduce-scattered, all-reduced, or both. (site_product.py)"""
    moves = p.gather_w + p.gather_x.gather(p.whole_x, p.x, p.next_rows * p.x_row if p.travels else None)
    scatters = [p.scatter_y.scatter(p.c(out), p.own_y(out)) for out in p.outs]
    reduces = [p.reduce_y.reduce(p.own_y(out)) for out in p.outs]
    if p.defers:  # every Y_i is scattered before the first is all-reduced
        return sum(scatters + reduces, moves)
    return sum((a + b for a, b in zip(scatters, reduces, strict=True)), moves)


def _moves_backward(p: _Product) -> Moves:
    """db_i of outer biases; W_i gathered again, dY_i gathered: c_i; X gathered again: a; dX: a; dW_i and other db_i."""
    return _backward(p).end()


def _backward(p: _Product) -> Storing:
    """One backward, up to the last use of each parameter; the store's reductions take their places in it."""
    storing = Storing(p.units)
    gather_w = p.gather_w if p.reads_w and not p.keeps_w and p.differentiates else Moves()
    for i, out in reversed(list(enumerate(p.outs))):
        if p.outer and p.has_bias[i] and (p.differentiates or out.trains_b):
            storing.finish(*p.place_of_bias(i))
        if p.scatter_y.size > 1 and p.differentiates and not p.defers:
            storing.add(gather_w + p.scatter_y.gather(p.c(out), p.own_y(out)))
            gather_w = Moves()
    storing.add(gather_w)
    if not p.differentiates:
        return storing
    if p.defers:
        for out in p.outs:
            storing.add(
                p.scatter_y.gather(p.c(out), p.own_y(out), p.next_rows * out.row if p.ring and p.streams else None)
            )
    storing.add(_moves_of_x(p))
    storing.form()
    for i in range(len(p.outs)):
        storing.finish(*p.place_of_weight(i))
        if p.has_bias[i] and not p.outer:
            storing.finish(*p.place_of_bias(i))
    return storing


def _moves_of_x(p: _Product) -> Moves:
    """X gathered again, dX scattered and reduced, in the order of the mode."""
    again, scattered, reduced = Moves(), Moves(), Moves()
    if p.trains_w and not p.keeps:
        again = p.gather_x.gather(p.whole_x, p.x, p.next_rows * p.x_row if p.travels else None)
    if p.needs_x:
        scattered, reduced = p.gather_x.scatter(p.whole_x, p.x), p.reduce_dx.reduce(p.x)
    if p.travels:  # the ring lets the sum of dX start first
        return scattered + again + reduced
    return scattered + reduced + again if p.blocking and p.gathers_w else again + scattered + reduced


# -- bytes kept --------------------------------------------------------------------------------------------------------


def _saved(p: _Product) -> int:
    """a where the gathered X is kept, else A; nothing where no W is trained."""
    if not p.trains_w:
        return 0
    return p.whole_x if p.keeps else p.x


def _transient_forward(p: _Product) -> int:
    """W (Σb_i) beside X gathered (a, or a ring's pieces) beside Σc_i; then, W and X gone unless kept, each reduction.

    A row's deferred product has no c_i, but sums that travel. (The stand-ins of what is deferred own an element where
    there is no X, in backward where there is no dY_i, to stand on.) Y in strips: _strips.
    """
    stand_ins = len(p.outs) * p.element if p.defers and not p.x else 0
    if p.streams:
        most = spare = 0
        for out in p.outs:
            two, after = p.running_sum(p.scatter_y, out.row)
            most = max(most, spare + two + after)  # the room of the sum before goes when this one has its own
            spare = after
        return most + p.whole_w + stand_ins
    gathered = p.carousel(p.x_row) if p.travels else p.whole_x if p.gather_x.size > 1 else 0
    if p.defers:
        reduced = max(p.reduce_scratch(p.own_y(out), p.reduce_y) for out in p.outs)
        return p.whole_w + max(gathered + _strips(p), reduced) + stand_ins
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


def _strips(p: _Product) -> int:
    """The most of Y alive beside W and X: strips [T,w] formed or forming, and with the one that travels its landing.

    Where X is gathered every strip is begun with the first rows of X that are there: Σc_i; else two are alive.
    """
    row, own = p.rows * p.element, p.scatter_y.part(p.rows) * p.element  # of one feature
    strips = [(stop - start, stop - start == out.n) for out in p.outs for start, stop in p.strips_of(out)]
    at_once = p.gather_x.size > 1
    alive = sum(width * row for width, _ in strips) if at_once else 0
    most = before = landing = 0
    for width, is_whole in strips:
        alive += 0 if at_once else width * row
        most = max(most, alive + landing)  # the product of this strip, while the one before travels
        landing = p.scatter_scratch(width * own, width * row, p.scatter_y) + (0 if is_whole else width * own)
        alive, before = alive - before, width * row
        most = max(most, alive + landing)
    return most


def _transient_backward(p: _Product) -> int:
    """dY gathered (Σc_i), W (Σb_i), dX unreduced (a) and its reduction's scratch, X gathered (a), dW unreduced (Σb_i).

    Blocking: W goes before dX is reduced; where W is gathered, X comes only then. Async: X comes first, dX goes last.
    In a ring, pieces instead, and W stays. Last, all else gone, the dW_i are reduce-scattered.
    """
    if not p.differentiates:
        return 0
    w = p.whole_w if p.reads_w or p.keeps_w else 0
    dw = _WeightGradients.of(p)
    kept = p.whole_x if p.keeps and p.gather_x.size > 1 else 0
    last = kept + _backward(p).most
    stand_ins = sum(p.element for out in p.outs if not p.own_y(out)) if p.defers else 0
    if p.streams:
        dy = sum(p.carousel(out.row) if p.ring else p.c(out) for out in p.outs)
        return max(dy + w + dw.summing, (0 if p.ring else dy) + dw.giving, last) + stand_ins
    dy, moments = 0, [last]
    for out in reversed(p.outs if p.scatter_y.size > 1 else ()):
        dy += p.c(out)
        moments.append(kept + dy + w + p.packed_y(out))
    dx, scratch, reduced = 0, 0, p.reduce_scratch(p.x, p.reduce_dx) if p.needs_x else 0
    if p.needs_x and p.gather_x.size > 1:
        dx = sum(p.running_sum(p.gather_x, p.x_row)) if p.ring_x else p.whole_x
        scratch = p.scatter_scratch(p.x, p.whole_x, p.gather_x) + p.packed_x
    x = 0
    if p.gather_x.size > 1 and p.trains_w:
        x = p.carousel(p.x_row) if p.travels else p.whole_x
    if p.ring_x:
        return max(*moments, dy + w + x + dx + dw.summing, kept + dy + dw.giving) + stand_ins
    packing = p.packed_x if x and not p.keeps else 0
    later = w if not p.reads_w else 0  # W was kept, and is not read
    if p.blocking:
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

    What a product of shared heads makes is laid into the shard. dW whose storage is split is whole until it is reduced.
    One linear's at a time where nothing is cut, else all linears' until the last piece is done (linear/pieces.py).
    """

    summing: int
    waiting: int
    giving: int

    @classmethod
    def of(cls, p: _Product) -> _WeightGradients:
        """Those of the site."""
        used = [(out.used_dw * out.trains_w + out.used_db * out.trains_b) if out.window else 0 for out in p.outs]
        whole = [out.dw if out in p.stored_apart else 0 for out in p.outs]
        each = [a if out.window else b for out, a, b in zip(p.outs, used, whole, strict=True)]
        cut = not p.blocking or bool(p.layout.chunks)
        giving = [sum(whole[: i + 1]) + used[i] + (sum(each[i + 1 :]) if cut else 0) for i in range(len(p.outs))]
        shares = [out.used_db for out in p.outs if out.trains_b and not p.outer]
        share = max(shares, default=0) if p.pieces > 1 else 0
        return cls(sum(each) + share, sum(each), max(giving)) if cut else cls(0, 0, max(giving))


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Out:
    """One linear: N'_i as the product reads and as W_i is held; bytes of a row of Y_i, and of dW and db as held and as
    the product makes them; what is trained.

    whole_dw, whole_db: bytes over the whole mesh. window: the product reads some rows of what is held only (shared
    heads). over_w, over_b: where dW and db are all-reduced.
    """

    n: int
    held: int
    row: int
    dw: int
    db: int
    used_dw: int
    used_db: int
    whole_dw: int
    whole_db: int
    window: bool
    trains_w: bool
    trains_b: bool
    over_w: Group
    over_b: Group


@dataclass(frozen=True)
class _Product:
    """A site's products on this rank: T = ``rows``, bytes of a row of X, and the groups of linear/product.py."""

    layout: GridLayout
    gather_x: Group
    reduce_dx: Group
    scatter_y: Group
    reduce_y: Group
    over_storage: Group
    rows: int
    x_row: int
    outs: tuple[_Out, ...]
    has_bias: tuple[bool, ...]
    needs_x: bool
    element: int
    backend: str

    @classmethod
    def of(
        cls,
        site: Site,
        layout: GridLayout,
        here: Here,
        element: int,
        bias: bool | Sequence[bool],
        frozen: Collection[str],
        backend: str,
    ) -> _Product:
        """Works out the local sizes; where gradients are partial is linear/grid_linear.py's rule."""
        width = here.cut(site.k, layout.k) * element
        over_b = layout.output_token_axes if layout.k else layout.m
        storage = layout.axes_where("w", "sharded")
        split = storage if here.group(storage).size > 1 else ()
        rest = tuple(axis for axis in layout.m if axis not in split)
        outs = []
        for i, linear in enumerate(site.linears):
            n, held, over_n = _features(linear, layout.n, here)
            used_b, held_b, _ = _features(linear, layout.output_feature_axes, here)
            has_bias = bias if isinstance(bias, bool) else bias[i]
            outs.append(
                _Out(
                    n=n,
                    held=held,
                    row=n * element,
                    dw=held * width,
                    db=held_b * element,
                    used_dw=n * width,
                    used_db=used_b * element,
                    whole_dw=linear.n * site.k * element,
                    whole_db=linear.n * element,
                    window=bool(over_n),
                    trains_w=not {"w", f"w{i}"} & set(frozen),
                    trains_b=has_bias and not {"b", f"b{i}"} & set(frozen),
                    over_w=here.group(rest + over_n),
                    over_b=here.group(over_b + over_n),
                )
            )
        return cls(
            layout=layout,
            gather_x=here.group(layout.axes_where("x", "sharded") + layout.axes_where("x", "sharded-features")),
            reduce_dx=here.group(layout.axes_where("x", "replicated")),
            scatter_y=here.group(layout.axes_where("y", "sharded") + layout.axes_where("y", "sharded-features")),
            reduce_y=here.group(layout.axes_where("y", "replicated")),
            over_storage=here.group(storage).joined(),
            rows=here.cut(site.m, layout.m),
            x_row=width,
            outs=tuple(outs),
            has_bias=tuple(bias if isinstance(bias, bool) else bias[i] for i in range(len(outs))),
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
        if self.x_by_features:
            return self.rows * self.gather_x.part(self.x_row // self.element) * self.element
        return self.gather_x.part(self.rows) * self.x_row

    def c(self, out: _Out) -> int:
        """c_i."""
        return self.rows * out.row

    def own_y(self, out: _Out) -> int:
        """C_i."""
        if self.y_by_features:
            return self.rows * self.scatter_y.part(out.n) * self.element
        return self.scatter_y.part(self.rows) * out.row

    @property
    def whole_w(self) -> int:
        """Σb_i, where W is gathered."""
        return sum(out.dw for out in self.outs) if self.gathers_w else 0

    def stored_w(self, out: _Out) -> int:
        """B_i, also of dW_i."""
        return self.over_storage.part(out.held) * self.x_row

    @property
    def gather_w(self) -> Moves:
        """Every W_i gathered at once."""
        return self.over_storage.gather(sum(out.dw for out in self.outs), sum(self.stored_w(out) for out in self.outs))

    @property
    def units(self) -> list[list[Stored]]:
        """The store's units and their members (linear/grid_linear.py): weights and biases in turn, or apart."""
        none = self.over_storage if self.over_storage.size == 1 else Group((), (), 0)
        members: list[list[Stored]] = [[], []]
        for out, has_bias in zip(self.outs, self.has_bias, strict=True):
            part = self.stored_w(out) if self.gathers_w else out.dw
            scratch = self.scatter_scratch(part, out.dw, self.over_storage)
            used = out.trains_w or self.needs_x
            weight = Stored(out.whole_dw, out.trains_w, used, out.dw, part, scratch, self.over_storage, out.over_w)
            members[0].append(weight)
            if has_bias:
                bias = Stored(out.whole_db, out.trains_b, out.trains_b, out.db, out.db, 0, none, out.over_b)
                members[self.biases_alone].append(bias)
        return members

    def place_of_weight(self, index: int) -> tuple[int, int]:
        """(unit, place in it)."""
        return 0, index if self.biases_alone else index + sum(self.has_bias[:index])

    def place_of_bias(self, index: int) -> tuple[int, int]:
        """(unit, place in it)."""
        before = sum(self.has_bias[:index])
        return (1, before) if self.biases_alone else (0, index + before + 1)

    @property
    def stored_apart(self) -> tuple[_Out, ...]:
        """Linears whose dW is reduce-scattered into storage."""
        return tuple(out for out in self.outs if out.trains_w and self.gathers_w)

    @property
    def x_by_features(self) -> bool:
        """X comes in parts of its features."""
        return bool(self.layout.axes_where("x", "sharded-features"))

    @property
    def y_by_features(self) -> bool:
        """Y is scattered along its features."""
        return bool(self.layout.axes_where("y", "sharded-features"))

    @property
    def packed_x(self) -> int:
        """A copy of this rank's part as its transpose, where X travels so."""
        return self.x if self.x_by_features and self.gather_x.size > 1 else 0

    def packed_y(self, out: _Out) -> int:
        """The same of Y_i."""
        return self.own_y(out) if self.y_by_features and self.scatter_y.size > 1 else 0

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
    def reads_w(self) -> bool:
        """Backward reads W."""
        return self.needs_x

    @property
    def gathers_w(self) -> bool:
        """W is gathered for this site alone."""
        return self.over_storage.size > 1

    @property
    def keeps_w(self) -> bool:
        """The gathered W stays until backward."""
        return self.gathers_w and self.layout.save_w == "gathered" and (self.needs_x or self.trains_w)

    @property
    def biases_alone(self) -> bool:
        """Biases are a unit of their own (linear/grid_linear.py)."""
        return bool(self.layout.axes_where("w", "sharded"))

    @property
    def keeps(self) -> bool:
        """Backward keeps the gathered X."""
        return self.layout.save_x == "gathered" and self.trains_w

    @property
    def outer(self) -> bool:
        """The bias is added after the reduction of Y, by a node of its own."""
        return self.scatter_y.size > 1 or self.reduce_y.size > 1

    @property
    def blocking(self) -> bool:
        """Nothing overlaps; a gather of features never does."""
        return self.layout.overlap == "blocking" or self.x_by_features

    @property
    def ring_x(self) -> bool:
        """dX goes around as sums of pieces."""
        return self.ring and self.gather_x.size > 1 and not self.x_by_features

    @property
    def ring(self) -> bool:
        """The mode is ring."""
        return self.layout.overlap == "ring"

    @property
    def travels(self) -> bool:
        """X goes around in pieces and is never whole."""
        return self.ring_x and not self.keeps

    @property
    def defers(self) -> bool:
        """The product is formed piece by piece by the node that reduces Y."""
        scatters = self.scatter_y.size > 1 and not self.y_by_features
        keeps = self.gather_x.size > 1 and self.layout.save_x == "gathered"
        return self.layout.overlap != "blocking" and scatters and not keeps and not self.x_by_features

    @property
    def streams(self) -> bool:
        """Of those, a row site: sums of Y and dY go around with pieces of tokens."""
        alone = self.gather_x.size == 1 and self.reduce_dx.size == 1 and self.reduce_y.size == 1
        return self.defers and alone and self.layout.reduce_dtype == "same"

    def strips_of(self, out: _Out) -> list[tuple[int, int]]:
        """Of the others: [start, stop) of the strips of features of Y_i."""
        count = self.layout.chunks or 4
        bounds = [chunk(out.n, count, index) for index in range(count)]
        return [(start, stop) for start, stop in bounds if start < stop] or [(0, 0)]

    @property
    def tokens(self) -> Group:
        """The ranks among which tokens are cut into pieces."""
        if self.gather_x.size > 1 and not self.x_by_features:
            return self.gather_x
        if self.scatter_y.size > 1 and not self.y_by_features:
            return self.scatter_y
        return Group((), (), 0)

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
        return self.tokens.size * self.chunks

    @property
    def _largest(self) -> int:
        return chunk(max(self.tokens.part(self.rows, i) for i in range(self.tokens.size)), self.chunks, 0)[1]

    def carousel(self, row: int) -> int:
        """Buffers for pieces of ``row`` bytes a row that come by: two, or one where only one ever comes."""
        return (2 if self.tokens.size * self.chunks > 2 else 1) * self._largest * row

    def running_sum(self, group: Group, row: int) -> tuple[int, int]:
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

    def scatter_scratch(self, own: int, whole: int, group: Group) -> int:
        """A reduce-scatter's, beside its result of ``own`` bytes: the sum in fp32 where wide, and parts that arrive.

        Two parts at most: all but the own one arrive, and where not wide the first of them lands in the result.
        """
        if self.backend == "nccl":
            return (own + whole) * 4 // self.element if self.wide else 0
        if self.wide:
            return own * 4 // self.element + own * min(2, group.size - 1)
        return own * min(2, group.size - 2)

    def reduce_scratch(self, whole: int, group: Group) -> int:
        """An all-reduce's: none; where wide it is a reduce-scatter into a part and a gather."""
        if not self.wide or group.size == 1:
            return 0
        own = group.part(whole // self.element) * self.element
        return own + self.scatter_scratch(own, whole, group)


def _features(linear: Linear, axes: tuple[str, ...], here: Here) -> tuple[int, int, tuple[str, ...]]:
    """Of one linear whose N is split by ``axes``: N' that the product reads, N' that is held, and where dW is partial.

    Units that are fewer than the ranks (key/value heads) are held whole by all, and each rank reads one of them.
    """
    split = here.group(axes)
    if linear.sharable and split.size > 1 and linear.units % split.size:
        return linear.unit, linear.n, axes
    groups = linear.groups if split.size > 1 else 1
    n = groups * here.cut(linear.n // groups, axes)
    return n, n, ()
