"""What a layout states and a site cannot do: settings that find nothing to act on, each with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from shardwright.spec.layout import GridLayout

Unapplied = tuple[str, str]
"""(setting, such as ``overlap: async``; because)."""


def unapplied(layout: GridLayout, sizes: Mapping[str, int], *, lookup: bool = False) -> Iterator[Unapplied]:
    """The settings of a site's layout that do nothing there, or not everywhere.

    sizes: mesh axis → ranks along it. lookup: the site is an embedding, which looks up rows and multiplies nothing.
    """

    def ranks(operand: str, word: str) -> int:
        return math.prod(sizes[axis] for axis in layout.axes_where(operand, word))

    gathers, by_features = ranks("x", "sharded"), ranks("x", "sharded-features") > 1
    scatters, scatters_features = ranks("y", "sharded"), ranks("y", "sharded-features") > 1
    reduces_dx, reduces_y = ranks("x", "replicated"), ranks("y", "replicated")
    alone = max(gathers, scatters, reduces_dx, reduces_y) == 1 and not by_features and not scatters_features
    if layout.overlap != "blocking":
        overlap = f"overlap: {layout.overlap}"
        if lookup:
            yield overlap, "an embedding looks rows up, and has no product that communication could run beside"
        elif alone:
            yield overlap, "no other rank has a part of its X or Y"
        else:
            if by_features:
                yield overlap, "its X travels by features, blocking"
            if scatters_features:
                yield overlap, "its Y travels by features, blocking"
            if reduces_y > 1:
                yield overlap, "its Y is all-reduced, blocking"
            if scatters > 1 and (by_features or (gathers > 1 and layout.save_x == "gathered")):
                yield overlap, "its Y travels blocking, since its X is " + ("by features" if by_features else "kept")
            if layout.overlap == "ring" and gathers == 1 and reduces_dx > 1:
                yield overlap, "its dX is all-reduced as async does it"
            if layout.overlap == "ring" and gathers > 1 and layout.save_x == "gathered":
                yield overlap, "its X is gathered as async does it, since it is kept"
    if layout.save_x == "gathered" and gathers == 1 and not by_features:
        yield "save_x: gathered", "its X is not gathered"
    if layout.save_w == "gathered" and ranks("w", "sharded") == 1:
        yield "save_w: gathered", "its W is not gathered"
    if layout.chunks and (lookup or (gathers == 1 and scatters == 1)):
        yield f"chunks: {layout.chunks}", "none of its operands travels in pieces of tokens"
    if layout.reduce_dtype != "same" and alone:
        yield f"reduce_dtype: {layout.reduce_dtype}", "it has no partial sums"
