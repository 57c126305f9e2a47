"""Draws: what a site's layout and use can be, at random, or as JSON. fuzz.py runs them."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

import torch

import shardwright as sw
from shardwright.overlap.product import check_supported
from shardwright.spec.layout import CHOICES

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = ("column", "row", "pair", "grid", "any", "mixed")
MESHES = ((2, 2, 2), (2, 1, 4), (2, 3, 1), (1, 2, 2), (2, 2, 1), (1, 1, 3), (1, 4, 2))
"""Sizes of data, tensor and depth where a form takes any roles."""


@dataclass(frozen=True)
class Draw:
    """One case: one site, or two in a row.

    form: a ``column`` or a ``row`` site over ``tensor``; a ``pair``, column then row, the siblings' outputs multiplied
    in between; a ``grid``, n over tensor and k over data; ``any`` roles and words of three axes, told by ``roles``
    (GridLayout's fields as JSON); ``mixed``, two such sites in a row, the second told by ``then``, with a conversion on
    the edge. tokens, k, n: whole sizes (of two sites: back to k).
    frozen: of ``x`` and ``0.w1``, ``1.b0`` (site, weight or bias, sibling). unused: the last sibling's output gets no
    gradient. passes: forwards before the first backward.
    """

    form: str
    tensor: int
    data: int
    overlap: str
    save_x: str
    chunks: int
    reduce_dtype: str
    x: str
    y: str
    tokens: int
    k: int
    n: tuple[int, ...]
    dtype: str
    bias: bool
    transposed: bool
    frozen: tuple[str, ...]
    unused: bool
    recompute: bool
    passes: int
    ndim: int
    poison: bool
    seed: int
    depth: int = 1
    roles: str = ""
    then: str = ""

    @property
    def two(self) -> bool:
        """Two sites in a row."""
        return self.form in ("pair", "mixed")

    @property
    def axes(self) -> dict[str, int]:
        """The mesh."""
        flat = {"data": self.data, "tensor": self.tensor}
        return {**flat, "depth": self.depth} if self.roles else flat

    @property
    def world(self) -> int:
        return self.tensor * self.data * self.depth

    @property
    def layouts(self) -> tuple[sw.GridLayout, ...]:
        """One for each site."""
        common = {"overlap": self.overlap, "chunks": self.chunks, "reduce_dtype": self.reduce_dtype}
        if self.roles:
            told = [roles for roles in (self.roles, self.then) if roles]
            return tuple(sw.GridLayout(**json.loads(roles), save_x=self.save_x, **common) for roles in told)
        column = {"n": ("tensor",), "x": self.x, "save_x": self.save_x}
        if self.form == "grid":
            return (sw.GridLayout(k=("data",), y=self.y, **column, **common),)
        column = sw.GridLayout(m=("data",), **column, **common)
        row = sw.GridLayout(m=("data",), k=("tensor",), y=self.y, **common)
        return {"column": (column,), "row": (row,), "pair": (column, row)}[self.form]

    @property
    def parameters(self) -> list[str]:
        """The names of all weights and biases."""
        sites = [len(self.n), 1] if self.two else [len(self.n)]
        kinds = ("w", "b") if self.bias else ("w",)
        return [f"{i}.{kind}{j}" for i, siblings in enumerate(sites) for j in range(siblings) for kind in kinds]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Draw:
        data = json.loads(text)
        return cls(**{**data, "n": tuple(data["n"]), "frozen": tuple(data["frozen"])})


def supported(layout: sw.GridLayout) -> bool:
    """The code runs this layout (it says InputError where it does not)."""
    try:
        check_supported(layout, {"data": 1, "tensor": 1, "depth": 1}, "draw")
    except sw.InputError:
        return False
    return True


def make(seed: int, number: int) -> Draw:
    """Draw ``number`` of the sequence ``seed``; it does not depend on the others."""
    rng = random.Random(f"{seed}/{number}")
    while True:
        draw = _any(rng)
        if all(supported(layout) for layout in draw.layouts):
            return draw


def _any(rng: random.Random) -> Draw:
    form = rng.choice(FORMS)
    tensor = rng.choices((1, 2, 3, 4, 8), (1, 4, 4, 4, 3))[0]
    data = 2 if tensor <= 4 and rng.random() < (0.7 if form == "grid" else 0.3) else 1
    depth, roles, then = 1, "", ""
    if form in ("any", "mixed"):
        data, tensor, depth = rng.choice(MESHES)
        roles = _roles(rng)
        then = _roles(rng) if form == "mixed" else ""

    def size(split: int) -> int:
        """Half of them divide."""
        return split * rng.randint(1, 4) if rng.random() < 0.5 else rng.randint(1, 21)

    siblings = rng.choice((1, 1, 2, 3))
    n = (size(tensor),) * siblings if form in ("pair", "mixed") else tuple(size(tensor) for _ in range(siblings))
    draw = Draw(
        form=form,
        tensor=tensor,
        data=data,
        overlap=rng.choice(tuple(CHOICES["overlap"])),
        save_x=rng.choice(("shard", "gathered")),
        chunks=rng.choice((0, 0, 1, 2, 3)),
        reduce_dtype=rng.choice(CHOICES["reduce_dtype"]),
        x=rng.choice(("sharded", "sharded", "replicated")),
        y=rng.choice(("sharded", "sharded", "replicated")),
        tokens=size(tensor * data * depth),
        k=size(tensor * depth),
        n=n,
        dtype=rng.choice(("float64", "float64", "float32", "bfloat16")),
        bias=rng.random() < 0.5,
        transposed=rng.random() < 0.2,
        frozen=(),
        unused=form not in ("pair", "mixed") and siblings > 1 and rng.random() < 0.2,
        recompute=rng.random() < 0.3,
        passes=rng.choice((1, 1, 1, 2)),
        ndim=rng.choice((2, 3)),
        poison=rng.random() < 0.5,
        seed=rng.randrange(10**6),
        depth=depth,
        roles=roles,
        then=then,
    )
    if rng.random() < 0.5:
        names = ["x", *draw.parameters]
        share = rng.random()
        frozen = tuple(name for name in names if rng.random() < share)
        draw = dataclasses.replace(draw, frozen=frozen)
        if not _reaches(draw):
            draw = dataclasses.replace(draw, frozen=())
    return draw


def _roles(rng: random.Random) -> str:
    """Roles and words of data, tensor and depth; some axes are idle."""
    fields: dict[str, Any] = {"m": [], "n": [], "k": []}
    for axis in ("data", "tensor", "depth"):
        role = rng.choice(("m", "n", "k", "m", "n", "k", ""))
        if role:
            fields[role].append(axis)
    for operand, role, words in (
        ("x", "n", ("sharded", "replicated")),
        ("y", "k", ("sharded", "replicated")),
        ("w", "m", ("sharded", "replicated")),
    ):
        fields[operand] = {axis: rng.choice(words) for axis in fields[role]}
        if operand != "w" and rng.random() < 0.25:
            fields[operand] = dict.fromkeys(fields[role], "sharded-features")
    fields["save_w"] = rng.choice(("shard", "gathered"))
    return json.dumps(fields)


def _reaches(draw: Draw) -> bool:
    """Something is trained on the way to every output (for siblings of one site that is one node for all)."""
    if draw.two:
        return len(draw.frozen) < 1 + len(draw.parameters)
    return "x" not in draw.frozen or any(f"0.w{i}" not in draw.frozen for i in range(len(draw.n)))
