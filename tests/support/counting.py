"""What a trace of one forward and one backward counts, in the words of ``cost.Volume``."""

from __future__ import annotations

from shardwright.formulas.place import Move
from shardwright.formulas.volume import Volume
from shardwright.trace import Alloc, Free, Trace


def counted(trace: Trace) -> Volume:
    """The volume that was recorded. Inputs, outputs, parameters and gradients must be alive when the record ends."""

    def moves(phase: str) -> tuple[Move, ...]:
        return tuple(Move(c.kind, c.axes, c.size, c.sent) for c in trace.collectives if c.phase == phase)

    return Volume(
        moves("forward"),
        moves("backward"),
        trace.saved_bytes,
        transient(trace, "forward"),
        transient(trace, "backward"),
    )


def transient(trace: Trace, phase: str) -> int:
    """The most bytes alive at once in a phase, of those that are gone when the record ends."""
    freed = {event.storage for event in trace.events if isinstance(event, Free)}
    alive = most = 0
    for event in trace.events:
        if isinstance(event, (Alloc, Free)) and event.storage in freed:
            size = trace.storages[event.storage].bytes
            alive += size if isinstance(event, Alloc) else -size
        if event.phase == phase:
            most = max(most, alive)
    return most
