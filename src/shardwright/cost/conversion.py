"""What a conversion on an edge moves, as formulas (linear/conversion.py tells the steps)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.cost.place import Here, Move, Moves
from shardwright.site import Step


def conversion_moves(
    steps: Sequence[Step],
    rows: int,
    width: int,
    sizes: Mapping[str, int],
    place: Mapping[str, int],
    element: int,
) -> tuple[Moves, Moves]:
    """(forward, backward): the collectives of one tensor, in issue order, as the rank at ``place`` sends them.

    rows: T, the tokens of one place on the m axes. width: the features that come in here. element: bytes.
    """
    here, forward, backward = Here(sizes, place), Moves(), Moves()
    for step in steps:
        group, within = here.group(step.axes), here.group(step.within).part(rows)
        if group.size == 1:
            continue
        part = group.part(within)
        whole, own = within * width * element, part * width * element
        if step.kind == "gather":
            forward += group.gather(whole, own)
        elif step.kind == "slice":
            backward = group.gather(whole, own) + backward
        else:
            held = width * group.size if step.kind == "to-tokens" else width
            size = within * held * element
            by_rows = part * (held - group.part(held)) * element  # of a rank that holds rows
            by_columns = (within - part) * group.part(held) * element  # of one that holds columns
            first, second = (by_rows, by_columns) if step.kind == "to-features" else (by_columns, by_rows)
            forward += (Move("all_to_all", group.axes, size, first),)
            backward = (Move("all_to_all", group.axes, size, second), *backward)
            width = group.part(held) if step.kind == "to-features" else held
    return forward, backward
