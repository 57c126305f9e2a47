"""What a trace is made of: operators, collectives, allocations and releases, and marks between phases.

Every event carries the training step and the phase in which it happened. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

CATEGORIES = (
    "parameter",
    "buffer",
    "input",
    "gradient",
    "optimizer",
    "saved",
    "gathered",
    "unreduced",
    "bucket",
    "temporary",
)
"""A storage bears the first of these that ever applied to it."""

PHASES = ("forward", "loss", "backward", "step")

POINTS = ("start", "after forward", "after loss", "after backward", "after step", "done")
"""Ledger points, in the order in which a step passes them."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call: its name and the shapes of its tensor arguments, in order."""

    step: int
    phase: str
    module: str
    name: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One logical collective, in issue order.

    kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast. axes: mesh axes that it spans; ranks: its
    members. size: bytes of the full tensor. sent: bytes that this rank sends (ring costs; THEORY: an all-gather or
    reduce-scatter of F bytes over n ranks moves (1−1/n)·F, an all-reduce 2(1−1/n)·F). mode: the overlap mode.
    """

    step: int
    phase: str
    module: str
    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    size: int
    sent: int
    mode: str = "blocking"


@dataclass(frozen=True, slots=True)
class Wait:
    """The program waited for (a part of) a collective that it had issued before: its kind and axes."""

    step: int
    phase: str
    module: str
    kind: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alloc:
    """Storage number ``storage`` came to life (or was first seen)."""

    step: int
    phase: str
    storage: int


@dataclass(frozen=True, slots=True)
class Free:
    """Storage number ``storage`` was released."""

    step: int
    phase: str
    storage: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A ledger point was passed (one of POINTS)."""

    step: int
    phase: str
    point: str


Event = Op | Collective | Wait | Alloc | Free | Mark


@dataclass(frozen=True, slots=True)
class Storage:
    """One owner of bytes: how many, its category, and the module and operator that asked for it."""

    bytes: int
    category: str
    module: str
    op: str
