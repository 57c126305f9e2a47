"""GridLayout: the roles that mesh axes play in one matrix product Y[M,N] = X[M,K] · W[N,K]ᵀ.

M counts tokens, N output features, K input features. Each mesh axis with a role splits one of the three. Each operand
needs two of them, and the layout says what it does on the axes of the third, its *missing role*:

| operand | is split by | missing role | `sharded` there            | `replicated` there             |
|---------|-------------|--------------|----------------------------|--------------------------------|
| X [M,K] | m, k        | n            | gathered before use        | held whole, dX is all-reduced  |
| W [N,K] | n, k        | m            | gathered before use        | held whole, dW is all-reduced  |
| Y [M,N] | m, n        | k            | partial sums, then reduce-scattered | partial sums, then all-reduced |

`sharded` parts of X and Y are parts of their tokens; `sharded-features` is the same with parts of their features.

Several axes in one role cut one after the other in mesh order, each into ⌈length/ranks⌉ pieces of what the one before
left (``mesh.nested_chunk``): that is DTensor's rule, for activations and weights alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.spec.site import Site

Word = str | tuple[tuple[str, str], ...]
"""One word for every axis, or sorted (axis, word) pairs; a mapping given to the constructor becomes such pairs."""

OPERAND_WORDS: dict[str, tuple[str, ...]] = {
    "x": ("sharded", "sharded-features", "replicated"),
    "w": ("sharded", "replicated"),
    "y": ("sharded", "sharded-features", "replicated"),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "save_x": ("shard", "gathered"),
    "save_w": ("shard", "gathered"),
    "overlap": ("blocking", "async", "ring"),
    "reduce_dtype": ("same", "float32"),
}


@dataclass(frozen=True)
class GridLayout:
    """How one product lies on the mesh.

    m, n, k: mesh axes that split tokens, output features, input features; an axis without a role is idle (the work is
        repeated along it).
    x, w, y: what the operand does on the axes of its missing role (n for x, m for w, k for y): one word, or
        ``{axis: word}``, kept as sorted pairs so that a layout hashes.
    save_x: what backward keeps of X: the ``shard`` (gathered again), or the ``gathered`` tensor.
    save_w: the same choice for W.
    overlap: ``blocking``, ``async`` or ``ring``.
    chunks: into how many pieces of tokens each rank's part of a product is cut. Modes that overlap need at least one
        (0 is 1 for them, and 2 for a ring of two ranks); 0 leaves a blocking product whole. Modes with equal chunks
        agree bit for bit.
    reduce_dtype: partial sums are added in their ``same`` dtype, or in ``float32`` (they travel in their own).

    Raises InputError where a word is not allowed, an axis has two roles, or a per-axis word names an axis that is not
    one of the operand's missing role.
    """

    m: tuple[str, ...] = ()
    n: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    x: Word | Mapping[str, str] = "sharded"
    w: Word | Mapping[str, str] = "replicated"
    y: Word | Mapping[str, str] = "sharded"
    save_x: str = "shard"
    save_w: str = "shard"
    overlap: str = "blocking"
    chunks: int = 0
    reduce_dtype: str = "same"

    def __post_init__(self) -> None:
        for role in ("m", "n", "k"):
            axes = getattr(self, role)
            object.__setattr__(self, role, (axes,) if isinstance(axes, str) else tuple(axes))
        seen: set[str] = set()
        for axis in self.m + self.n + self.k:
            if axis in seen:
                raise InputError(f"layout: found axis {axis!r} twice; allowed: one role for each axis")
            seen.add(axis)
        for operand, role in (("x", "n"), ("w", "m"), ("y", "k")):
            self._check_operand(operand, getattr(self, role))
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 0:
            raise InputError(f"layout.chunks: found {self.chunks!r}; allowed: a whole number of at least 0")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"layout.{name}: found {getattr(self, name)!r}; allowed: {', '.join(allowed)}")

    def _check_operand(self, operand: str, missing: tuple[str, ...]) -> None:
        value, allowed = getattr(self, operand), OPERAND_WORDS[operand]
        if isinstance(value, Mapping):
            value = tuple(sorted(value.items()))
        elif not isinstance(value, str):
            value = tuple(sorted((axis, word) for axis, word in value))
        object.__setattr__(self, operand, value)
        pairs = (("", value),) if isinstance(value, str) else value
        for axis, word in pairs:
            if word not in allowed:
                raise InputError(f"layout.{operand}: found {word!r}; allowed: {', '.join(allowed)}")
            if axis and axis not in missing:
                names = ", ".join(missing) or "none"
                raise InputError(
                    f"layout.{operand}: found axis {axis!r}; allowed: the axes of its missing role ({names})"
                )

    def word(self, operand: str, axis: str) -> str:
        """What ``operand`` (x, w or y) does on ``axis``, an axis of its missing role."""
        value: Word = getattr(self, operand)
        if isinstance(value, str):
            return value
        return dict(value).get(axis, "replicated" if operand == "w" else "sharded")

    def axes_where(self, operand: str, word: str) -> tuple[str, ...]:
        """The axes of the operand's missing role on which it is ``word``, in the role's order."""
        missing = {"x": self.n, "w": self.m, "y": self.k}[operand]
        return tuple(axis for axis in missing if self.word(operand, axis) == word)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis with a role."""
        return self.m + self.n + self.k

    @property
    def input_token_axes(self) -> tuple[str, ...]:
        """Axes that split the rows of X as it is given: m, then the n axes on which X is held in parts."""
        return self.m + self.axes_where("x", "sharded")

    @property
    def output_token_axes(self) -> tuple[str, ...]:
        """Axes that split the rows of Y as it is returned: m, then the k axes over which Y is reduce-scattered."""
        return self.m + self.axes_where("y", "sharded")

    @property
    def input_feature_axes(self) -> tuple[str, ...]:
        """Axes that split the features of X as it is given: k, then the n axes on which it is in parts of features."""
        return self.k + self.axes_where("x", "sharded-features")

    @property
    def output_feature_axes(self) -> tuple[str, ...]:
        """Axes that split the features of Y as it is returned: n, then the k axes that scatter Y along its features."""
        return self.n + self.axes_where("y", "sharded-features")

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data for a plan file."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name in ("m", "n", "k"):
                value = list(value)
            elif field.name in OPERAND_WORDS and not isinstance(value, str):
                value = dict(value)
            data[field.name] = value
        return data


# Presets: a preset is a function site → GridLayout. The names are those of the data and tensor axes of the mesh.


def replicate(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """Data parallel (DDP): tokens split over ``data``; weights whole; ``tensor``, if there is one, is idle."""
    return GridLayout(m=(data,))


def tensor_all_reduce(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """Tensor parallel, all-reduce mode: hidden states whole on every tensor rank.

    Column sites: dX all-reduced in backward. Row sites: Y all-reduced in forward.
    """
    if site.kind == "column":
        return GridLayout(m=(data,), n=(tensor,), x="replicated")
    return GridLayout(m=(data,), k=(tensor,), y="replicated")


def sequence_parallel(site: Site, *, data: str = "data", tensor: str = "tensor", save_x: str = "shard") -> GridLayout:
    """Tensor parallel with tokens of the hidden states split over ``tensor`` (gather/scatter mode).

    Column sites: X gathered, dX reduce-scattered; backward keeps the shard and gathers again, or keeps the gathered X
    (``save_x="gathered"``). Row sites: Y reduce-scattered, dY gathered.
    """
    if site.kind == "column":
        return GridLayout(m=(data,), n=(tensor,), x="sharded", save_x=save_x)
    return GridLayout(m=(data,), k=(tensor,), y="sharded")


def sequence_parallel_async(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """``sequence_parallel`` whose collectives run beside the products that do not need them."""
    return replace(sequence_parallel(site, data=data, tensor=tensor), overlap="async")


def sequence_parallel_ring(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """``sequence_parallel`` whose operands travel around the axis in pieces, never gathered."""
    return replace(sequence_parallel(site, data=data, tensor=tensor), overlap="ring")


def sequence_parallel_keep(site: Site, *, data: str = "data", tensor: str = "tensor") -> GridLayout:
    """``sequence_parallel`` that keeps the gathered input for backward instead of gathering it again."""
    return sequence_parallel(site, data=data, tensor=tensor, save_x="gathered")


# The presets of grids. Consecutive sites swap the roles of j and l: what a column site splits by n, the row site behind
# it splits by k, and the other way round, so that edges join without a conversion. In the mesh, i (and d) come before j
# and l.


def _swapped(site: Site, first: str, second: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(n, k) of a site: first, second of a column site, the other way round of a row site."""
    return ((first,), (second,)) if site.kind == "column" else ((second,), (first,))


def grid_scatter(site: Site, *, i: str = "i", j: str = "j", k: str = "l") -> GridLayout:
    """3D, design 1: X and W gathered, Y reduce-scattered. Of P ranks each keeps 1/P of every activation and weight.

    Column sites: X [M/(i·j), K/l] gathered over j, W over i, Y [M/(i·l), N/j] reduce-scattered over l.
    """
    by_n, by_k = _swapped(site, j, k)
    return GridLayout(m=(i,), n=by_n, k=by_k, x="sharded", w="sharded", y="sharded")


def grid_reduce(site: Site, *, i: str = "i", j: str = "j", k: str = "l") -> GridLayout:
    """3D, design 2: W gathered, Y all-reduced. Activations are split over two axes, weights over three.

    Column sites: X [M/i, K/l] whole over j (dX all-reduced), Y [M/i, N/j] all-reduced over l.
    """
    by_n, by_k = _swapped(site, j, k)
    return GridLayout(m=(i,), n=by_n, k=by_k, x="replicated", w="sharded", y="replicated")


def grid_2d(site: Site, *, i: str = "i", j: str = "j") -> GridLayout:
    """2D, gather form: X [M/i, K/j] gathered along its features, W over i; Y [M/i, N/j] comes out whole."""
    return GridLayout(m=(i,), n=(j,), x="sharded-features", w="sharded")


def grid_25d(site: Site, *, i: str = "i", d: str = "d", j: str = "j") -> GridLayout:
    """2.5D: ``grid_2d`` with tokens split over d too, and a copy of W on each of its ranks (dW all-reduced over d)."""
    return GridLayout(m=(i, d), n=(j,), x="sharded-features", w={i: "sharded", d: "replicated"})


presets: dict[str, Callable[[Site], GridLayout]] = {
    "replicate": replicate,
    "tensor-all-reduce": tensor_all_reduce,
    "sequence-parallel": sequence_parallel,
    "sequence-parallel-keep": sequence_parallel_keep,
    "sequence-parallel-async": sequence_parallel_async,
    "sequence-parallel-ring": sequence_parallel_ring,
    "grid-scatter": grid_scatter,
    "grid-reduce": grid_reduce,
    "grid-2d": grid_2d,
    "grid-25d": grid_25d,
}
"""Presets by the name that plan files and ``--layout`` use."""


def preset(name: str) -> Callable[[Site], GridLayout]:
    """The preset of that name; InputError names those that exist."""
    if name not in presets:
        raise InputError(f"layout: found {name!r}; allowed: {', '.join(presets)}")
    return presets[name]
