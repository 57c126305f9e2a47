"""A site's sizes on one rank, as its formulas use them: local rows and features, bytes, groups, pieces and scratch.

T rows are multiplied; K', N'_i are the local features, e the bytes of an element; volume.py's table names the rest.
What a layout makes of them is overlap/product.py's rule, pieces are overlap/pieces.py's, scratch is comm/exchange.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwright.formulas.place import Group, Here, Moves
from shardwright.formulas.storing import Stored
from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import chunk
from shardwright.spec.resolved import Resolved, resolve
from shardwright.spec.site import Linear, Site


@dataclass(frozen=True)
class Out:
    """One linear: N'_i; bytes of a row of Y_i, and of dW and db; what is trained.

    whole_dw, whole_db: bytes over the whole mesh. over_w, over_b: where dW and db are all-reduced.
    """

    n: int
    row: int
    dw: int
    db: int
    whole_dw: int
    whole_db: int
    trains_w: bool
    trains_b: bool
    over_w: Group
    over_b: Group


@dataclass(frozen=True)
class Sizes:
    """A site's products on this rank: T = ``rows``, bytes of a row of X, and the groups of overlap/product.py."""

    layout: GridLayout
    resolved: Resolved
    gather_x: Group
    reduce_dx: Group
    scatter_y: Group
    reduce_y: Group
    over_storage: Group
    rows: int
    x_row: int
    outs: tuple[Out, ...]
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
    ) -> Sizes:
        """Works out the local sizes; where gradients are partial is linear/grid_linear.py's rule."""
        width = here.cut(site.k, layout.k) * element
        over_b = layout.output_token_axes if layout.k else layout.m
        storage = layout.axes_where("w", "sharded")
        split = storage if here.group(storage).size > 1 else ()
        rest = tuple(axis for axis in layout.m if axis not in split)
        outs = []
        for i, linear in enumerate(site.linears):
            n, alike = _features(linear, layout.n, here)
            width_b, _ = _features(linear, layout.output_feature_axes, here)
            has_bias = bias if isinstance(bias, bool) else bias[i]
            outs.append(
                Out(
                    n=n,
                    row=n * element,
                    dw=n * width,
                    db=width_b * element,
                    whole_dw=linear.n * site.k * element,
                    whole_db=linear.n * element,
                    trains_w=not {"w", f"w{i}"} & set(frozen),
                    trains_b=has_bias and not {"b", f"b{i}"} & set(frozen),
                    over_w=here.group(rest).beside(alike, here.sizes),
                    over_b=here.group(over_b).beside(alike, here.sizes),
                )
            )
        return cls(
            layout=layout,
            resolved=resolve(layout, here.sizes),
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

    def c(self, out: Out) -> int:
        """c_i."""
        return self.rows * out.row

    def own_y(self, out: Out) -> int:
        """C_i."""
        if self.y_by_features:
            return self.rows * self.scatter_y.part(out.n) * self.element
        return self.scatter_y.part(self.rows) * out.row

    @property
    def whole_w(self) -> int:
        """Σb_i, where W is gathered."""
        return sum(out.dw for out in self.outs) if self.gathers_w else 0

    def stored_w(self, out: Out) -> int:
        """B_i, also of dW_i."""
        return self.over_storage.part(out.n) * self.x_row

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
    def stored_apart(self) -> tuple[Out, ...]:
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

    def packed_y(self, out: Out) -> int:
        """The same of Y_i."""
        return self.own_y(out) if self.y_by_features and self.scatter_y.size > 1 else 0

    # what the layout makes of them (overlap/product.py)

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
    def travels(self) -> bool:
        """X goes around in pieces and is never whole."""
        return self.resolved.x_travels and not self.keeps

    def feature_chunks_of(self, out: Out) -> list[tuple[int, int]]:
        """[start, stop) of the feature chunks of Y_i."""
        count = self.resolved.feature_chunks
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

    # pieces (overlap/pieces.py, overlap/ring_collectives.py)

    @property
    def pieces(self) -> int:
        """Into how many pieces dW and db are summed up, where they are cut at all."""
        return self.tokens.size * self.resolved.chunks

    @property
    def _largest(self) -> int:
        return chunk(max(self.tokens.part(self.rows, i) for i in range(self.tokens.size)), self.resolved.chunks, 0)[1]

    def ring_all_gather(self, row: int) -> int:
        """Buffers for pieces of ``row`` bytes a row that come by: two, or one where only one ever comes."""
        return (2 if self.tokens.size * self.resolved.chunks > 2 else 1) * self._largest * row

    def ring_reduce_scatter(self, group: Group, row: int) -> tuple[int, int]:
        """Two buffers for sums that travel; and room for a share, where the result has none left (uneven parts)."""
        own = group.part(self.rows)
        fits = True
        for sub in range(self.resolved.chunks):
            pieces = [chunk(group.part(self.rows, ahead), self.resolved.chunks, sub) for ahead in range(group.size)]
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


def _features(linear: Linear, axes: tuple[str, ...], here: Here) -> tuple[int, Group]:
    """Of one linear whose N is split by ``axes``: N' that the rank holds, and the ranks that hold the same.

    Units that are fewer than the ranks (key/value heads): each rank holds one of them, as its neighbours do.
    """
    split = here.group(axes)
    if linear.sharable and split.size > 1 and linear.units % split.size:
        return linear.unit, split.copies(linear.units)
    groups = linear.groups if split.size > 1 else 1
    return groups * here.cut(linear.n // groups, axes), Group((), (), 0)
