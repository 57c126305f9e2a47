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

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardwright.errors import InputError

Word = str | tuple[tuple[str, str], ...]
"""One word for every axis, or sorted (axis, word) pairs; a mapping given to the constructor becomes such pairs."""

OPERAND_WORDS: dict[str, tuple[str, ...]] = {
    "x": ("sharded", "sharded-features", "replicated"),
    "w": ("sharded", "replicated"),
    "y": ("sharded", "sharded-features", "replicated"),
}


@dataclass(frozen=True)
class OverlapMode:
    """module: where it is, with the signature of overlap/blocking.py. overlaps: collectives run beside products.
    travels: operands and sums go around the axis, in their own element type.
    """

    module: str
    overlaps: bool = True
    travels: bool = False


OVERLAP_MODES: dict[str, OverlapMode] = {
    "blocking": OverlapMode("shardwright.overlap.blocking", overlaps=False),
    "async": OverlapMode("shardwright.overlap.asynchronous"),
    "ring": OverlapMode("shardwright.overlap.ring", travels=True),
}
"""The words of ``GridLayout.overlap``. A new mode is one file in ``overlap/`` and a line here."""

CHOICES: dict[str, Collection[str]] = {
    "save_x": ("shard", "gathered"),
    "save_w": ("shard", "gathered"),
    "overlap": OVERLAP_MODES,
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
