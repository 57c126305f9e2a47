"""Edges: how an activation is split as one site leaves it and as the next takes it, and the steps that convert it.

Axes that split the batch stay; any other splits tokens, features or nothing at each end.

| step            | the axes split | then     |
|-----------------|----------------|----------|
| gather          | tokens         | nothing  |
| slice           | nothing        | tokens   |
| gather-features | features       | nothing  |
| slice-features  | nothing        | features |
| to-features     | tokens         | features |
| to-tokens       | features       | tokens   |

A step concerns the axes that are cut last (cuts are nested in mesh order). Where others stand behind them, these are
undone first, and made again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count

from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import size_along
from shardwright.spec.site import Site

Split = tuple[tuple[str, ...], tuple[str, ...]]
"""(axes that split tokens, axes that split features) of an activation."""

TOKENS, FEATURES, NOTHING = 0, 1, 2
KINDS = {
    "gather": (TOKENS, NOTHING),
    "slice": (NOTHING, TOKENS),
    "gather-features": (FEATURES, NOTHING),
    "slice-features": (NOTHING, FEATURES),
    "to-features": (TOKENS, FEATURES),
    "to-tokens": (FEATURES, TOKENS),
}
"""Step → what its axes split before and after."""


@dataclass(frozen=True)
class Step:
    """One step of a conversion (reshard/conversion.py tells what each moves).

    kind: see above, over ``axes``. tokens, features: the axes, beside those of the batch, that split them before the
    step and after it.
    """

    kind: str
    axes: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


def conversion(left: Split, taken: Split, batch: Collection[str], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """The steps from what one site leaves to what the next takes that send the fewest bytes, both passes together.

    batch: the axes that split the batch, which split tokens at both ends. sizes: the mesh, in its order.
    """
    start, goal = (_beside(split, batch, sizes) for split in (left, taken))
    found = count()  # among equals, the one that was found first
    queue: list[tuple[float, int, int, Split, tuple[Step, ...]]] = [(0.0, 0, next(found), start, ())]
    done = set[Split]()
    while queue:
        sent, _, _, here, steps = heapq.heappop(queue)
        if here == goal:
            return steps
        if here in done:
            continue
        done.add(here)
        for step, there in _steps(here, goal, sizes):
            path = (*steps, step)
            heapq.heappush(queue, (sent + _sent(step, here, sizes), len(path), next(found), there, path))
    raise AssertionError("every split can be gathered and sliced")


def _beside(split: Split, batch: Collection[str], sizes: Mapping[str, int]) -> Split:
    tokens, features = (tuple(axis for axis in sizes if axis in axes and axis not in batch) for axes in split)
    return tokens, features


def _steps(here: Split, goal: Split, sizes: Mapping[str, int]) -> Iterator[tuple[Step, Split]]:
    """(a step that can be made, where it leads)."""
    order = list(sizes)
    for kind, (before, after) in KINDS.items():
        if before == NOTHING:
            free = [axis for axis in goal[after] if axis not in here[TOKENS] + here[FEATURES]]
            choices = [axes for n in range(1, len(free) + 1) for axes in combinations(free, n)]
        else:
            choices = [here[before][place:] for place in range(len(here[before]))]
        for axes in choices:
            kept = [tuple(axis for axis in split if axis not in axes) for split in here]
            if after != NOTHING and any(order.index(axis) > order.index(axes[0]) for axis in kept[after]):
                continue
            there = [*kept, ()]
            there[after] = (*there[after], *axes)
            yield Step(kind, axes, kept[TOKENS], kept[FEATURES]), (there[TOKENS], there[FEATURES])


def _sent(step: Step, here: Split, sizes: Mapping[str, int]) -> float:
    """What a rank sends in both passes, in units of the whole activation (formulas/conversion.py has the bytes)."""
    held = 1 / size_along(sizes, here[TOKENS] + here[FEATURES])
    ranks = size_along(sizes, step.axes)
    if step.kind.startswith("to-"):
        return 2 * held * (ranks - 1) / ranks
    return held * (ranks - 1) / (ranks if step.kind.startswith("slice") else 1)


Edges = tuple[dict[str, tuple[Step, ...]], dict[str, tuple[Step, ...]]]


def edges(
    sites: Sequence[Site], layouts: Mapping[str, GridLayout], batch: Collection[str], sizes: Mapping[str, int]
) -> Edges:
    """(site → conversion of its input, site → conversion of its output), those that are needed.

    What sites leave to the residual stream is split as the first one leaves it, since it is added up: others convert
    to that. Every other conversion is made by the site that takes. batch: of the m axes of every layout, those that
    split the batch.
    """
    stream = next((site for site in sites if site.hidden), None)
    inputs, outputs = dict[str, tuple[Step, ...]](), dict[str, tuple[Step, ...]]()
    for site in sites:
        left = left_by(layouts[site.name])
        if site.hidden and stream is not None:
            other = left_by(layouts[stream.name])
            outputs[site.name] = conversion(left, other, batch, sizes)
            left = other
        for name in site.after:
            taken = layouts[name].input_token_axes, layouts[name].input_feature_axes
            inputs[name] = conversion(left, taken, batch, sizes)
    return {name: steps for name, steps in inputs.items() if steps}, {
        name: steps for name, steps in outputs.items() if steps
    }


def left_by(layout: GridLayout) -> Split:
    """How Y is split as it is returned."""
    return layout.output_token_axes, layout.output_feature_axes
