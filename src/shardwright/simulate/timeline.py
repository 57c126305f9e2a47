"""The time of a step, read off its trace: one compute stream, and one communication stream for each mesh axis.

Operators follow each other on the compute stream. A collective occupies the streams of all its axes; what is launched
on a stream runs in the order of launches, one at a time. ``waits`` = W is how often the program waits for it:

| mode        | launched                                                                | compute stands until    |
|-------------|-------------------------------------------------------------------------|-------------------------|
| blocking    | at its event, as a whole                                                | all of it is there      |
| async, ring | in W equal pieces: piece k at its first send, or, if it is not one of the | at its k-th wait: piece |
|             | first that may be under way together, at wait k minus their number       | k is there              |

Under way together are all pieces of a gather that does not go round a ring, two of a direct reduce-scatter on gloo
(exchange.py lets as many arrive), one of anything else: rings, and operations that several launches join. The first
send is the first of c10d's operators after the event that no collective logged later claims (a sum round a ring is
logged before its first share is formed); without one it is the event itself.

Collectives of several axes that run at once on one kind of link (within a host, or between hosts) share it equally:
each takes as many times as long. Where a collective was measured beside products, it and compute are both slower by the
factor ``contention`` for as long as both run; while compute stands the collective is not.
What is never waited for is there at the end. Overlap of the host with devices and allocator stalls are no part of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.simulate.machine import Machine
from shardwright.simulate.operators import PRODUCTS
from shardwright.trace.events import Collective, Event, Op, Wait
from shardwright.trace.trace import Trace

COMPUTE = "compute"
"""Name of the compute stream; the others bear the names of their axes."""


class Span(NamedTuple):
    """What one stream did: seconds from the start of the step."""

    stream: str
    name: str
    module: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step (or part of one) by the model.

    compute: in which operators ran. exposed: axis → in which compute stood for a collective over it (one over several
    axes counts for each). busy: axis → in which a collective over it ran. phases: phase → in all; they sum to seconds.
    at: when compute reached each event.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    busy: dict[str, float]
    phases: dict[str, float]
    spans: tuple[Span, ...]
    at: tuple[float, ...] = ()


def timeline(events: Trace | Sequence[Event], machine: Machine, step: int | None = 1) -> Timeline:
    """How long ``step`` of a trace takes on ``machine``.

    events: a trace, or any part of its events in their order (a block's, say; what it does not wait for ends with it,
    what it did not issue takes nothing). step: None takes all events.
    """
    given = events.events if isinstance(events, Trace) else events
    chosen = [event for event in given if step is None or event.step == step]
    return _Clock(machine).run(chosen)


@dataclass(eq=False)
class _Operation:
    """One collective of the trace. begins: index of the event at which its first piece is launched."""

    event: Collective
    begins: int
    waits: int = 0
    pieces: list[_Transfer] = field(default_factory=list)
    launched: int = 0
    waited: int = 0

    @property
    def blocking(self) -> bool:
        return self.event.mode == "blocking"

    def leaves_at_once(self, backend: str) -> bool:
        """Whether all pieces are sent to their ranks when the first one is: a gather, a direct reduce-scatter."""
        if self.event.mode == "ring":
            return False
        direct = backend == "gloo" and self.waits == len(self.event.ranks) - 1
        return self.event.kind == "all_gather" or (self.event.kind == "reduce_scatter" and direct)

    def together(self, backend: str) -> int:
        """Pieces that may be under way at once."""
        if not self.leaves_at_once(backend):
            return 1
        return len(self.pieces) if self.event.kind == "all_gather" else 2


@dataclass(eq=False)
class _Transfer:
    """A part of a collective. left: seconds that it still takes alone; slow: how many times as long beside compute;
    link: the kind of link that it loads.
    """

    operation: _Operation
    left: float
    slow: float
    link: str
    start: float | None = None
    done: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return self.operation.event.axes


class _Clock:
    """Plays events. ``_under_way``: pieces launched and not done, in the order of their launches."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._now = self._compute = 0.0
        self._under_way: list[_Transfer] = []
        self._busy: dict[str, float] = {}
        self._exposed: dict[str, float] = {}
        self._phases: dict[str, float] = {}
        self._spans: list[Span] = []
        self._at: list[float] = []

    def run(self, events: Sequence[Event]) -> Timeline:
        operations, awaited = _operations(events)
        begun: dict[int, list[_Operation]] = {}
        for operation in operations:
            self._cut(operation)
            begun.setdefault(operation.begins, []).append(operation)
        for index, event in enumerate(events):
            before = self._now
            self._at.append(before)
            for operation in begun.get(index, ()):
                self._launch(operation)
            if isinstance(event, Op):
                self._work(event)
            elif isinstance(event, Collective) and event.mode == "blocking":
                self._await(begun[index][-1].pieces)
            elif isinstance(event, Wait) and index in awaited:
                self._wait(awaited[index])
            self._phases[event.phase] = self._phases.get(event.phase, 0.0) + self._now - before
        if events:
            before = self._now
            self._finish(operations)
            self._phases[events[-1].phase] += self._now - before
        spans = tuple(sorted(self._spans, key=lambda span: span.start))
        return Timeline(self._now, self._compute, self._exposed, self._busy, self._phases, spans, tuple(self._at))

    def _cut(self, operation: _Operation) -> None:
        event, count = operation.event, max(1, operation.waits)
        for axis in event.axes:
            self._busy.setdefault(axis, 0.0)
            self._exposed.setdefault(axis, 0.0)
        takes = self._machine.ring if event.mode == "ring" else self._machine.collective
        # Pieces that leave at once share one latency; those that follow each other pay it each.
        messages = 1 if operation.leaves_at_once(self._machine.backend) else count
        seconds = takes(event.kind, event.axes, event.size, event.sent, messages)
        slow, link = self._machine.contention(event.kind, event.axes), self._machine.link(event.axes)
        operation.pieces = [_Transfer(operation, seconds / count, slow, link) for _ in range(count)]

    def _launch(self, operation: _Operation) -> None:
        """As many pieces as may be under way beyond those that were waited for."""
        due = min(operation.waited + operation.together(self._machine.backend), len(operation.pieces))
        self._under_way += operation.pieces[operation.launched : due]
        operation.launched = max(operation.launched, due)

    def _work(self, event: Op) -> None:
        seconds = self._machine.operator(event.name, event.shapes)
        if seconds:
            start = self._now
            self._pass(seconds, computing=True)
            self._compute += self._now - start
            self._spans.append(Span(COMPUTE, event.name, event.module, start, self._now))

    def _wait(self, operation: _Operation) -> None:
        self._launch(operation)
        self._await(operation.pieces[: operation.waited + 1])
        operation.waited += 1
        if operation.waited < len(operation.pieces):
            self._launch(operation)

    def _finish(self, operations: Iterable[_Operation]) -> None:
        for operation in operations:
            while operation.launched < len(operation.pieces):
                operation.waited += 1
                self._launch(operation)
        self._await(list(self._under_way))

    def _await(self, pieces: Iterable[_Transfer]) -> None:
        """Compute stands until these are done."""
        for piece in pieces:
            while not piece.done:
                before = self._now
                moving = self._moving()
                self._pass(min(_seconds(each, moving) for each in moving), computing=False)
                for axis in piece.axes:
                    self._exposed[axis] += self._now - before

    def _moving(self) -> list[_Transfer]:
        """The pieces at the head of all their streams."""
        taken = set[str]()
        heads = []
        for piece in self._under_way:
            if taken.isdisjoint(piece.axes):
                heads.append(piece)
            taken.update(piece.axes)
        return heads

    def _pass(self, seconds: float, computing: bool) -> None:
        """So many seconds of compute (or of standing) are done, and with them what is under way.

        Together with collectives compute takes longer: all are slowed down alike, by the slowest's factor.
        """
        while self._under_way:
            moving = self._moving()
            slow = max(piece.slow for piece in moving) if computing else 1.0
            takes = [_seconds(piece, moving) for piece in moving]
            least = min(takes)
            done = min(least, seconds)
            for piece in moving:
                if piece.start is None:
                    piece.start = self._now
                for axis in piece.axes:
                    self._busy[axis] += done * slow
            self._now += done * slow
            seconds -= done
            for piece, whole in zip(moving, takes, strict=True):
                if whole == done:
                    self._end(piece)
                else:
                    piece.left *= 1 - done / whole
            if least > done:
                break
        self._now += seconds

    def _end(self, piece: _Transfer) -> None:
        piece.done, piece.left = True, 0.0
        self._under_way.remove(piece)
        assert piece.start is not None
        event = piece.operation.event
        if self._now > piece.start:
            self._spans += [Span(axis, event.kind, event.module, piece.start, self._now) for axis in event.axes]


def _seconds(piece: _Transfer, moving: Sequence[_Transfer]) -> float:
    """That ``piece`` still takes while all of ``moving`` are under way."""
    return piece.left * sum(each.link == piece.link for each in moving)


def _operations(events: Sequence[Event]) -> tuple[list[_Operation], dict[int, _Operation]]:
    """The collectives, and which one the wait at an index is for.

    Waits name kind, axes and module. Those between one issue of that name and the next are for the collectives issued
    before them without a wait between (the gathers of a site's dYs), in turn.
    """
    operations: list[_Operation] = []
    awaited: dict[int, _Operation] = {}
    alike: dict[tuple[str, tuple[str, ...], str], list[_Operation]] = {}
    turn: dict[tuple[str, tuple[str, ...], str], int] = {}
    for index, event in enumerate(events):
        if not isinstance(event, (Collective, Wait)):
            continue
        key = (event.kind, event.axes, event.module)
        if isinstance(event, Collective):
            operations.append(_Operation(event, index))
            if event.mode != "blocking":
                if turn.pop(key, 0):
                    alike.pop(key)
                alike.setdefault(key, []).append(operations[-1])
        elif key in alike:
            operation = alike[key][turn.get(key, 0) % len(alike[key])]
            turn[key] = turn.get(key, 0) + 1
            operation.waits += 1
            awaited[index] = operation
    _find_first_sends(events, operations, awaited)
    return operations, awaited


def _find_first_sends(
    events: Sequence[Event], operations: Iterable[_Operation], awaited: dict[int, _Operation]
) -> None:
    """Moves ``begins`` to the first send. A run of c10d's operators without a product between is one launch."""
    issued: Iterator[_Operation] = iter(operations)
    pending: list[_Operation] = []
    sending = False
    for index, event in enumerate(events):
        if isinstance(event, Collective):
            operation = next(issued)
            sending = operation.blocking
            if not operation.blocking:
                pending.append(operation)
        elif isinstance(event, Wait):
            sending = False
            if index in awaited and awaited[index] in pending:
                pending.remove(awaited[index])
        elif isinstance(event, Op):
            if not event.name.startswith("c10d."):
                sending = sending and not _is_product(event.name)
            elif not sending:
                sending = True
                if pending:
                    pending.pop().begins = index


def _is_product(name: str) -> bool:
    return name.removeprefix("aten.").partition(".")[0].rstrip("_") in PRODUCTS
