"""A Trace and its readers. Every number that is told about a step is read off its events here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.trace import file
from shardwright.trace.events import CATEGORIES, PHASES, Alloc, Collective, Event, Free, Mark, Storage


@dataclass(frozen=True)
class Peak:
    """The most that was alive at once in one phase of one step, by category (bytes)."""

    step: int
    phase: str
    total: int
    categories: dict[str, int]


@dataclass(frozen=True)
class Point:
    """What is alive at one ledger point, by category (bytes)."""

    step: int
    name: str
    total: int
    categories: dict[str, int]


@dataclass(frozen=True)
class Entry:
    """Bytes alive at one ledger point that one module asked for in one category."""

    step: int
    point: str
    category: str
    module: str
    bytes: int


@dataclass(frozen=True)
class Alive:
    """One storage alive at the peak: bytes, category, the module and operator that asked for it."""

    bytes: int
    category: str
    module: str
    op: str


class Trace:
    """The ordered record of one rank's steps.

    events: operators, collectives, allocations, releases and marks, in order. storages: what Alloc and Free number.
    saved: bytes held by the autograd graph at each start of a backward pass. arena: the slots that its leases needed
    (dtype → sizes in bytes, largest first), where known.
    """

    def __init__(
        self,
        events: list[Event] | None = None,
        storages: list[Storage] | None = None,
        saved: list[int] | None = None,
        arena: dict[str, list[int]] | None = None,
    ):
        self.events: list[Event] = events or []
        self.storages: list[Storage] = storages or []
        self.saved: list[int] = saved or []
        self.arena: dict[str, list[int]] = arena or {}

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Logical collectives in issue order."""
        return tuple(event for event in self.events if isinstance(event, Collective))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in the first step."""
        return sum(event.sent for event in self.collectives if event.step == 1)

    @property
    def saved_bytes(self) -> int:
        """Distinct storage, without parameters and buffers, that the autograd graph holds when forward ends.

        The largest over the backward passes recorded.
        """
        return max(self.saved, default=0)

    @property
    def peak_bytes(self) -> int:
        """The most tensor storage alive at once, one owner for each byte."""
        return max((peak.total for peak in self.peaks), default=0)

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Phase → the most alive at once in it, the larger of the steps recorded."""
        peaks: dict[str, int] = {}
        for peak in self.peaks:
            peaks[peak.phase] = max(peak.total, peaks.get(peak.phase, 0))
        return {phase: peaks[phase] for phase in PHASES if phase in peaks}

    def _replay(self) -> Iterator[tuple[Event, int, dict[str, int]]]:
        """Every event with the bytes alive after it, in all and by category (one dictionary, changed as it goes)."""
        total, categories = 0, dict.fromkeys(CATEGORIES, 0)
        for event in self.events:
            if isinstance(event, (Alloc, Free)):
                storage = self.storages[event.storage]
                change = storage.bytes if isinstance(event, Alloc) else -storage.bytes
                total += change
                categories[storage.category] += change
            yield event, total, categories

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The peak of each phase of each step, in order of appearance.

        A phase's peak counts from its first event on, so what it inherits alive counts too.
        """
        best: dict[tuple[int, str], Peak] = {}
        for event, total, categories in self._replay():
            key = (event.step, event.phase)
            if key not in best or total > best[key].total:
                best[key] = Peak(*key, total, dict(categories))
        return tuple(best.values())

    @property
    def points(self) -> tuple[Point, ...]:
        """The ledger points passed, in order; with several micro-batches a point is passed several times."""
        return tuple(
            Point(event.step, event.point, total, dict(categories))
            for event, total, categories in self._replay()
            if isinstance(event, Mark)
        )

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """Ledger point × category × module, points in order, the largest entries of each first.

        The entries of a point sum to its total. A parameter, gradient or buffer is its own module's, by its name.
        """
        living = dict[int, None]()
        entries: list[Entry] = []
        for event in self.events:
            if isinstance(event, Alloc):
                living[event.storage] = None
            elif isinstance(event, Free):
                living.pop(event.storage, None)
            elif isinstance(event, Mark):
                sums: dict[tuple[str, str], int] = {}
                for number in living:
                    storage = self.storages[number]
                    key = (storage.category, storage.module)
                    sums[key] = sums.get(key, 0) + storage.bytes
                rows = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
                entries += [Entry(event.step, event.point, *key, size) for key, size in rows]
        return tuple(entries)

    @property
    def alive_at_peak(self) -> tuple[Alive, ...]:
        """Every storage alive at the (first) peak, largest first."""
        peak, living, at_peak = -1, dict[int, None](), list[int]()
        for event, total, _ in self._replay():
            if isinstance(event, Alloc):
                living[event.storage] = None
            elif isinstance(event, Free):
                living.pop(event.storage, None)
            if total > peak:
                peak, at_peak = total, []
            if total == peak and not at_peak:
                at_peak = list(living)
        alive = [self.storages[number] for number in at_peak]
        alive.sort(key=lambda storage: (-storage.bytes, storage.category, storage.module, storage.op))
        return tuple(Alive(s.bytes, s.category, s.module, s.op) for s in alive)

    def table(self) -> str:
        """Category × ledger point, in bytes, as text; each column sums to its total.

        A point passed several times (micro-batches) shows its largest total.
        """
        columns: dict[tuple[int, str], Point] = {}
        for point in self.points:
            key = (point.step, point.name)
            if key not in columns or point.total > columns[key].total:
                columns[key] = point
        heads = [f"{step}: {name}" for step, name in columns]
        rows = [["", *heads]]
        for category in CATEGORIES:
            rows.append([category, *(f"{point.categories[category]:,}" for point in columns.values())])
        rows.append(["total", *(f"{point.total:,}" for point in columns.values())])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )

    def save(self, path: str | Path) -> None:
        """Writes the trace as compressed JSON, whole or not at all."""
        file.save(path, self.events, self.storages, self.saved, self.arena)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a trace back; InputError in one line where the file is not one."""
        return cls(*file.load(path))
