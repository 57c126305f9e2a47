"""Site: one place in a model where one tensor meets one or more linears, and the edges that join sites."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright._errors import InputError
from shardwright.layout import GridLayout


@dataclass(frozen=True)
class Linear:
    """One linear of a site.

    name: qualified module name, e.g. ``model.layers.0.self_attn.q_proj``.
    n: output features. unit: features that stay together when n is split (a head's size; 1 where any cut is right).
    groups: n is that many equal parts, each split on its own (3 for fused q, k, v).
    sharable: units may be held by several ranks (key/value heads), where there are fewer of them than ranks.
    """

    name: str
    n: int
    unit: int = 1
    groups: int = 1
    sharable: bool = False

    @property
    def units(self) -> int:
        """How many pieces of one group can be told apart."""
        return self.n // self.groups // self.unit


@dataclass(frozen=True)
class Site:
    """X[M,K] meets ``linears``, whose weights are W_i[n_i,K].

    kind: ``column`` where the features of Y go on split to the next site, ``row`` where the features of X came split.
    k_unit: features of K that stay together when K is split.
    after: names of the sites that take this site's output; hidden: they take it through the residual stream
        (tokens split, features whole) rather than feature by feature.
    An embedding is a row site whose X is the one-hot matrix of the tokens and whose K is the vocabulary.
    """

    name: str
    kind: str
    m: int
    k: int
    linears: tuple[Linear, ...]
    k_unit: int = 1
    after: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def n(self) -> int:
        """Output features of all linears together."""
        return sum(linear.n for linear in self.linears)


def check_divides(site: Site, layout: GridLayout, sizes: Mapping[str, int]) -> None:
    """Raises InputError where the layout cuts what must stay whole.

    Tokens and plain features may be cut unevenly (the last ranks get less, or nothing). Heads may not: they must divide
    by the ranks, or be sharable and the ranks divide by them. sizes: mesh axis → number of ranks along it.
    """
    for axis in layout.axes:
        if axis not in sizes:
            raise InputError(f"{site.name}: layout names axis {axis!r}; allowed: the mesh's axes ({', '.join(sizes)})")

    def ranks(axes: Sequence[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    over = ranks(layout.output_feature_axes)
    for linear in site.linears:
        if linear.unit == 1 and linear.groups == 1:
            continue
        shared = linear.sharable and over % linear.units == 0 and layout.output_feature_axes == layout.n
        if linear.units % over and not shared:
            allowed = f"a multiple of {'×'.join(layout.output_feature_axes)} = {over}" + (
                ", or a divisor of it" if linear.sharable else ""
            )
            raise InputError(f"{site.name}: heads of {linear.name} is {linear.units}; allowed: {allowed}")
    over = ranks(layout.input_feature_axes)
    if site.k_unit > 1 and site.k // site.k_unit % over:
        heads = site.k // site.k_unit
        raise InputError(
            f"{site.name}: heads is {heads}; allowed: a multiple of {'×'.join(layout.input_feature_axes)} = {over}"
        )


Split = tuple[tuple[str, ...], tuple[str, ...]]
"""(axes that split tokens, axes that split features) of an activation."""


@dataclass(frozen=True)
class Step:
    """One step of a conversion (linear/conversion.py tells what each moves).

    kind: ``gather``, ``slice``, ``to-features`` or ``to-tokens``, over ``axes``. within: the axes beside m that split
    tokens before and after.
    """

    kind: str
    axes: tuple[str, ...]
    within: tuple[str, ...] = ()


def conversion(left: Split, taken: Split, m: Sequence[str], order: Sequence[str]) -> tuple[Step, ...] | None:
    """The steps from what one site leaves to what the next takes; None where there are no such steps.

    Axes that split tokens on one side may split nothing, or features, on the other. m must split tokens on both, and
    axes that change must be cut after those that stay. order: the mesh's axes.
    """
    tokens, features = (set(axes) for axes in left)
    tokens_then, features_then = (set(axes) for axes in taken)
    if (
        not set(m) <= tokens & tokens_then
        or features - features_then - tokens_then
        or features_then - features - tokens
    ):
        return None

    def sort(axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in order if axis in axes)

    stay, kept = sort((tokens & tokens_then) - set(m)), features & features_then
    changes = [
        ("to-features", sort(tokens & features_then)),
        ("gather", sort(tokens - tokens_then - features_then)),
        ("to-tokens", sort(features & tokens_then)),
        ("slice", sort(tokens_then - tokens - features)),
    ]
    steps = tuple(Step(kind, axes, stay) for kind, axes in changes if axes)
    if len(steps) > 1 and (steps[0].kind, steps[1].kind) in (("to-features", "gather"), ("to-tokens", "slice")):
        return None
    for step in steps:
        before = [*m, *stay, *(kept if step.kind.startswith("to-") else ())]
        places = [order.index(axis) for axis in before]
        if places and max(places) > min(order.index(axis) for axis in step.axes):
            return None
    return steps


Edges = tuple[dict[str, tuple[Step, ...]], dict[str, tuple[Step, ...]]]


def edges(sites: Sequence[Site], layouts: Mapping[str, GridLayout], order: Sequence[str]) -> Edges:
    """(site → conversion of its input, site → conversion of its output), those that are needed.

    What sites leave to the residual stream is split as the first one leaves it, since it is added up: others convert
    to that. Every other conversion is made by the site that takes. Raises InputError where there is none.
    """
    stream = next((site for site in sites if site.hidden), None)
    inputs, outputs = dict[str, tuple[Step, ...]](), dict[str, tuple[Step, ...]]()
    for site in sites:
        left = left_by(layouts[site.name])
        if site.hidden and stream is not None:
            other = left_by(layouts[stream.name])
            outputs[site.name] = _between(site.name, left, "the residual stream is", other, layouts[site.name].m, order)
            left = other
        for name in site.after:
            into = layouts[name]
            taken = into.input_token_axes, into.input_feature_axes
            inputs[name] = _between(site.name, left, f"{name} takes it", taken, into.m, order)
    return {name: steps for name, steps in inputs.items() if steps}, {
        name: steps for name, steps in outputs.items() if steps
    }


def left_by(layout: GridLayout) -> Split:
    """How Y is split as it is returned."""
    return layout.output_token_axes, layout.output_feature_axes


def _between(
    name: str, left: Split, other: str, taken: Split, m: Sequence[str], order: Sequence[str]
) -> tuple[Step, ...]:
    if all(set(a) == set(b) for a, b in zip(left, taken, strict=True)):
        return ()
    steps = conversion(left, taken, m, order)
    if steps is None:
        found, wanted = (f"tokens split by ({', '.join(a)}) and features by ({', '.join(b)})" for a, b in (left, taken))
        raise InputError(
            f"layouts: {name} leaves {found}, {other} {wanted}; allowed: the same on both ends, or axes beside m that "
            "split tokens on one and nothing or features on the other"
        )
    return steps


def exchanged_axes(qkv: GridLayout) -> tuple[str, ...]:
    """The axes that split tokens where q, k, v leave their site, and heads while attention is at work.

    Attention needs whole sequences, of which the m axes hold as many each.
    """
    return qkv.axes_where("y", "sharded")


def check_heads(qkv: Site, layout: GridLayout, sizes: Mapping[str, int]) -> None:
    """Raises InputError where heads cannot be exchanged for tokens: they must divide by all axes that split them."""
    exchanged = exchanged_axes(layout)
    if math.prod(sizes[axis] for axis in exchanged) == 1:
        return
    axes = layout.output_feature_axes + exchanged
    over = math.prod(sizes[axis] for axis in axes)
    for linear in qkv.linears:
        if linear.groups > 1:
            raise InputError(
                f"{qkv.name}: layout.y: found 'sharded' over ({', '.join(exchanged)}) with queries, keys and values in "
                "one linear; allowed: replicated"
            )
        if linear.units % over:
            raise InputError(
                f"{qkv.name}: heads of {linear.name} is {linear.units}; allowed: a multiple of {'×'.join(axes)} = "
                f"{over}, since tokens split by ({', '.join(exchanged)}) are exchanged for heads"
            )
