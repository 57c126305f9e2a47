"""What a conversion on an edge moves, and what gives attention its whole sequences, as formulas.

reshard/conversion.py and reshard/head_exchange.py tell the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardwright.formulas.place import Here, Move, Moves
from shardwright.spec.edge import Step
from shardwright.spec.layout import GridLayout
from shardwright.spec.site import Site, exchanged_axes, gathers_heads, held_heads


def conversion_moves(
    steps: Sequence[Step],
    rows: int,
    width: int,
    sizes: Mapping[str, int],
    place: Mapping[str, int],
    element: int,
    unit: int = 1,
) -> tuple[Moves, Moves]:
    """(forward, backward): the collectives of one tensor, in issue order, as the rank at ``place`` sends them.

    rows, width: tokens of one place on the batch axes, and features, of the whole tensor. element: bytes. unit:
    features that stay together.
    """
    here, forward, backward = Here(sizes, place), Moves(), Moves()
    for step in steps:
        group = here.group(step.axes)
        if group.size == 1:
            continue
        tokens, features = here.cut(rows, step.tokens), here.cut(width // unit, step.features) * unit
        own_rows, own_columns = group.part(tokens), group.part(features // unit) * unit
        whole, by_rows, by_columns = (
            size * element for size in (tokens * features, own_rows * features, tokens * own_columns)
        )
        if step.kind.startswith("to-"):
            corner = own_rows * own_columns * element  # what stays
            sent = [by_rows - corner, by_columns - corner]
            first, second = sent if step.kind == "to-features" else sent[::-1]
            forward += (Move("all_to_all", group.axes, whole, first),)
            backward = (Move("all_to_all", group.axes, whole, second), *backward)
            continue
        gathered = group.gather(whole, by_columns if step.kind.endswith("features") else by_rows)
        if step.kind.startswith("gather"):
            forward += gathered
        else:
            backward = gathered + backward
    return forward, backward


def attention_moves(
    qkv: Site,
    out: Site,
    layout: GridLayout,
    batch: Collection[str],
    rows: int,
    sizes: Mapping[str, int],
    place: Mapping[str, int],
    element: int,
) -> tuple[Moves, Moves]:
    """(forward, backward) of what gives attention whole sequences, between q, k, v of ``layout`` and ``out``.

    batch: the axes that split the batch. rows: tokens of one place on them. element: bytes.
    """
    axes, here = exchanged_axes(layout, batch), Here(sizes, place)
    group, over = here.group(axes), here.group(layout.output_feature_axes).size
    forward, backward = Moves(), Moves()
    if group.size == 1:
        return forward, backward
    queries = held_heads(qkv.linears[0], over)
    for linear in qkv.linears:
        if gathers_heads(linear, queries, over, group.size):
            row = held_heads(linear, over) * linear.unit * element
            whole, own = rows * row, group.part(rows) * row
            there, back = group.gather(whole, own), group.scatter(whole, own)
        else:
            step = Step("to-features", axes, (), layout.output_feature_axes)
            there, back = conversion_moves([step], rows, linear.n, sizes, place, element, linear.unit)
        forward, backward = forward + there, back + backward
    step = Step("to-tokens", axes, (), layout.output_feature_axes)
    there, back = conversion_moves([step], rows, out.k, sizes, place, element, out.k_unit)
    return forward + there, back + backward
