"""The layouts that the demo compares, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwright._errors import DoesNotFit, InputError
from shardwright._files import format_bytes
from shardwright._plan import Plan
from shardwright.trace import Trace

MOST = 9
"""Candidates that are rehearsed, at most."""

DATA_LEVELS = ("replicate", "optimizer", "parameters")
"""How pure data parallelism stores parameters, where nothing else is asked for (sharding.py)."""

TENSOR_LAYOUTS = ("tensor-all-reduce", "sequence-parallel", "sequence-parallel-keep")


def enumerate_layouts(ranks: int, level: str | None = None) -> list[tuple[dict[str, int], str, str]]:
    """(mesh, layout name, level) of up to `MOST` candidates for ``ranks``.

    Pure data parallelism first, at several levels, then growing tensor axes; all at ``level`` where it is given.
    """
    data = {"data": ranks, "tensor": 1}
    levels = (level,) if level is not None else DATA_LEVELS if ranks > 1 else DATA_LEVELS[:1]
    found = [(data, "replicate", each) for each in levels]
    for tensor in range(2, ranks + 1):
        if ranks % tensor == 0:
            mesh = {"data": ranks // tensor, "tensor": tensor}
            found += [(mesh, layout, level or "replicate") for layout in TENSOR_LAYOUTS]
    return found[:MOST]


def global_batch(ranks: int, wanted: int = 8) -> int:
    """The multiple of ``ranks`` nearest to ``wanted`` (the smaller of two), so that every data size divides it."""
    below = wanted // ranks * ranks
    return below if below and wanted - below <= below + ranks - wanted else below + ranks


@dataclass(frozen=True)
class Candidate:
    """A mesh, a layout and a level, with the plan and the rehearsal of rank 0, or the line that refused them."""

    mesh: dict[str, int]
    layout: str
    level: str = "replicate"
    plan: Plan | None = None
    trace: Trace | None = None
    refused: str | None = None

    @property
    def name(self) -> str:
        """``data=2,tensor=2 sequence-parallel``, and the level where it splits storage."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{mesh} {self.layout}" + (f" {self.level}" if self.level != "replicate" else "")

    @property
    def peak(self) -> int:
        """Bytes alive at the peak of rank 0."""
        return self.trace.peak_bytes if self.trace else 0

    @property
    def sent(self) -> int:
        """Bytes that rank 0 sends in the first step."""
        return self.trace.sent_bytes if self.trace else 0

    def fits(self, memory: int | None) -> bool:
        """Whether the layout is valid and its peak within ``memory`` bytes (None: no limit)."""
        return self.trace is not None and (memory is None or self.peak <= memory)

    def to_json(self, memory: int | None) -> dict[str, Any]:
        """Plain data for ``--json``."""
        known = {"peak": self.peak, "sent": self.sent} if self.trace else {"peak": None, "sent": None}
        named = {"mesh": self.mesh, "layout": self.layout, "level": self.level}
        return {**named, **known, "fits": self.fits(memory), "refused": self.refused}


def by_preference(candidates: Sequence[Candidate], memory: int | None) -> list[Candidate]:
    """Those that fit: fewest bytes sent first, among equals the smaller peak.

    Raises InputError where no candidate is valid, DoesNotFit where none meets the limit.
    """
    valid = [candidate for candidate in candidates if candidate.trace is not None]
    if not valid:
        raise InputError(
            f"ranks: no layout is possible ({candidates[0].refused}); allowed: a number that divides the sizes"
        )
    fitting = [candidate for candidate in valid if candidate.fits(memory)]
    if not fitting:
        raise does_not_fit([(candidate.peak, candidate.name) for candidate in valid], memory)
    return sorted(fitting, key=lambda candidate: (candidate.sent, candidate.peak))


def does_not_fit(peaks: Sequence[tuple[int, str]], memory: int | None) -> DoesNotFit:
    """The error that tells the smallest of ``peaks`` (bytes, name of the candidate)."""
    peak, name = min(peaks)
    return DoesNotFit(
        f"no layout fits in {format_bytes(memory or 0)} ({memory:,} bytes): the smallest peak found is "
        f"{format_bytes(peak)} ({peak:,} bytes), of {name}"
    )


def reason(chosen: Candidate, fitting: Sequence[Candidate], tried: int, memory: int | None) -> str:
    """Why ``chosen``, in one sentence."""
    ties = [candidate for candidate in fitting if candidate.sent == chosen.sent]
    limit = f" and fit in {format_bytes(memory)}" if memory is not None else ""
    among = f"of the {len(fitting)} (out of {tried}) layouts that are possible{limit}"
    tie = f", and of the {len(ties)} that send as few has the smallest peak" if len(ties) > 1 else ""
    return f"Chosen: {chosen.name}, which sends the fewest bytes ({chosen.sent:,} a step) {among}{tie}."


def candidate_table(candidates: Sequence[Candidate], memory: int | None, chosen: Candidate | None = None) -> Table:
    """One row a candidate: mesh, layout, peak, bytes sent, whether it fits; a refused one shows its line."""
    limit = f", limit {format_bytes(memory)}" if memory is not None else ""
    table = Table(title=f"Candidates, rehearsed for rank 0 at equal global batch{limit}")
    table.add_column("data × tensor", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("peak (bytes)", justify="right")
    table.add_column("sent in a step (bytes)", justify="right")
    table.add_column("fits", overflow="fold")
    for candidate in candidates:
        mesh = " × ".join(str(size) for size in candidate.mesh.values())
        if candidate.trace is None:
            table.add_row(
                mesh, candidate.layout, candidate.level, "–", "–", Text(f"refused: {candidate.refused}"), style="dim"
            )
            continue
        fits = "no" if not candidate.fits(memory) else "yes, chosen" if candidate is chosen else "yes"
        style = "bold" if candidate is chosen else ""
        figures = (f"{candidate.peak:,}", f"{candidate.sent:,}")
        table.add_row(mesh, candidate.layout, candidate.level, *figures, fits, style=style)
    return table
