"""What a layout comes to on a mesh, decided once: what overlaps, how it is cut, and which settings find nothing to do.

| ``Resolved``  | a site of which                                            | so its product is                     |
|---------------|------------------------------------------------------------|---------------------------------------|
| deferred      | Y is reduce-scattered by tokens, X is not kept gathered,   | formed by the node that reduces Y,    |
|               | and the mode overlaps                                      | piece by piece                        |
| streamed      | of these: neither X nor Y communicates otherwise, and sums | a ring: sums of Y, and dY, go around  |
|               | are taken in their own element type                        | with pieces of tokens                 |
| deferred only | X is gathered too, Y all-reduced over other axes, or sums  | cut into ``feature_chunks`` of Y      |
|               | are fp32                                                   |                                       |

The runtime adds process groups to it (``overlap/product.py``), the formulas add bytes (``formulas/sizes.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.spec.layout import OVERLAP_MODES, GridLayout
from shardwright.spec.mesh import size_along

FEATURE_CHUNKS = 4
"""Where the layout states no chunks: a quarter of the reduction of Y is not hidden."""

LOOKUP = "an embedding looks rows up, and has no product that communication could run beside"
"""Why an embedding overlaps nothing."""

Unapplied = tuple[str, str]
"""(setting, such as ``overlap: async``; because)."""


@dataclass(frozen=True)
class Resolved:
    """One site's layout on a mesh.

    mode, module: the overlap mode, and the file that runs it (``layout.OVERLAP_MODES``). overlaps: it is not blocking.
    travels: operands and sums go around the axis, in their own element type. x_blocks: the gather of X and the
    reduction of dX are waited for at once. x_travels: dX goes around as sums of pieces, and X too unless it is kept
    gathered. deferred, streamed: the module's table. chunks: pieces of each rank's tokens, where they travel in pieces.
    feature_chunks: of Y_i, where it is scattered so; else 1. otherwise: where the mode does not do what its word says,
    why; empty: it does, for every operand.
    """

    mode: str
    module: str
    overlaps: bool
    travels: bool
    x_blocks: bool
    x_travels: bool
    deferred: bool
    streamed: bool
    chunks: int
    feature_chunks: int
    otherwise: tuple[str, ...]


def resolve(layout: GridLayout, sizes: Mapping[str, int]) -> Resolved:
    """What ``layout`` comes to. sizes: mesh axis → ranks along it."""
    ranks = _Ranks(layout, sizes)
    by_features = bool(layout.axes_where("x", "sharded-features"))
    mode = OVERLAP_MODES[layout.overlap]
    overlaps, travels = mode.overlaps, mode.travels
    late = ranks.scatters_y > 1 and not ranks.keeps_x and not by_features  # all can be left to the second node
    deferred = overlaps and late
    alone = ranks.gathers_x == 1 and not ranks.x_by_features and ranks.reduces_dx == 1 and ranks.reduces_y == 1
    row = alone and layout.reduce_dtype == "same"
    # Two ranks would else pass halves on, of which none travels beside a product.
    fewest = 2 if travels and (ranks.gathers_x if ranks.gathers_x > 1 else ranks.scatters_y) == 2 else 1
    # Blocking cuts alike where chunks are stated.
    feature_chunks = layout.chunks or (FEATURE_CHUNKS if deferred else 1)
    return Resolved(
        mode=layout.overlap,
        module=mode.module,
        overlaps=overlaps,
        travels=travels,
        x_blocks=not overlaps or by_features,
        x_travels=travels and ranks.gathers_x > 1,
        deferred=deferred,
        streamed=deferred and row,
        chunks=layout.chunks or fewest,
        feature_chunks=feature_chunks if late and not row else 1,
        otherwise=tuple(_otherwise(layout, ranks, travels)) if overlaps else (),
    )


def unapplied(layout: GridLayout, sizes: Mapping[str, int], *, lookup: bool = False) -> Iterator[Unapplied]:
    """The settings of a site's layout that do nothing there, or not everywhere.

    sizes: mesh axis → ranks along it. lookup: the site is an embedding, which looks up rows and multiplies nothing.
    """
    ranks = _Ranks(layout, sizes)
    resolved = resolve(layout, sizes)
    for because in (LOOKUP,) if lookup and resolved.overlaps else resolved.otherwise:
        yield f"overlap: {resolved.mode}", because
    if layout.save_x == "gathered" and ranks.gathers_x == 1 and not ranks.x_by_features:
        yield "save_x: gathered", "its X is not gathered"
    if layout.save_w == "gathered" and ranks.gathers_w == 1:
        yield "save_w: gathered", "its W is not gathered"
    if layout.chunks and (lookup or (ranks.gathers_x == 1 and ranks.scatters_y == 1)):
        yield f"chunks: {layout.chunks}", "none of its operands travels in pieces of tokens"
    if layout.reduce_dtype != "same" and ranks.alone:
        yield f"reduce_dtype: {layout.reduce_dtype}", "it has no partial sums"


def _otherwise(layout: GridLayout, ranks: _Ranks, travels: bool) -> Iterator[str]:
    """Why what the mode says does not come about, or not everywhere."""
    if ranks.alone:
        yield "no other rank has a part of its X or Y"
        return
    if ranks.x_by_features:
        yield "its X travels by features, blocking"
    if ranks.y_by_features:
        yield "its Y travels by features, blocking"
    if ranks.reduces_y > 1:
        yield "its Y is all-reduced, blocking"
    kept = ranks.gathers_x > 1 and layout.save_x == "gathered"
    if ranks.scatters_y > 1 and (ranks.x_by_features or kept):
        yield "its Y travels blocking, since its X is " + ("by features" if ranks.x_by_features else "kept")
    if travels and ranks.gathers_x == 1 and ranks.reduces_dx > 1:
        yield "its dX is all-reduced as async does it"
    if travels and kept:
        yield "its X is gathered as async does it, since it is kept"


class _Ranks:
    """How many ranks take part in what a layout does with each operand; 1 is none but this one."""

    def __init__(self, layout: GridLayout, sizes: Mapping[str, int]):
        def ranks(operand: str, word: str) -> int:
            return size_along(sizes, layout.axes_where(operand, word))

        self.gathers_x, self.x_by_features = ranks("x", "sharded"), ranks("x", "sharded-features") > 1
        self.scatters_y, self.y_by_features = ranks("y", "sharded"), ranks("y", "sharded-features") > 1
        self.reduces_dx, self.reduces_y = ranks("x", "replicated"), ranks("y", "replicated")
        self.gathers_w = ranks("w", "sharded")
        # The node that saves the gathered X must have gathered it.
        self.keeps_x = (self.gathers_x > 1 or self.x_by_features) and layout.save_x == "gathered"
        most = max(self.gathers_x, self.scatters_y, self.reduces_dx, self.reduces_y)
        self.alone = most == 1 and not self.x_by_features and not self.y_by_features
