"""A short trace cut into pieces, one block's at a time: what each adds, holds at most, sends and takes.

A piece is a maximal run of events during which operators of one block (or of none) are at work, in one phase. Blocks
ascend in forward and descend in backward; a replay of a recomputed block is part of its backward. What equal blocks do
is equal, so that a model with more of them has more pieces of the same kind, and every number below is linear in how
many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwright.trace import Alloc, Collective, Event, Free, Op, Trace


@dataclass(frozen=True)
class TracePiece:
    """One piece of a trace.

    block: number of the block at work, or None. part: of a block, ``attention`` or ``mlp``. micro: the micro-batch.
    start, most, end: bytes alive before it, at most in it, and after it. sent: bytes that its collectives send.
    saved: bytes that it made and the graph holds when backward begins. lasting: bytes that it made and that outlive the
    step. first, last: its events, half open.
    """

    step: int
    phase: str
    micro: int
    block: int | None
    part: str
    start: int
    most: int
    end: int
    sent: int
    saved: int
    lasting: int
    first: int
    last: int


def cut(trace: Trace, blocks: str, attention: str, first_norm: str) -> list[TracePiece]:
    """The pieces of ``trace``, in order.

    blocks: qualified name of the list of blocks (``model.layers``). attention, first_norm: names in a block; what is
    below them belongs to the part ``attention``, anything else that is below the block to ``mlp``; the block's own
    operators (residual sums) go on with the part at work.
    """
    place = re.compile(rf"{re.escape(blocks)}\.(\d+)(?:\.(.*))?$")
    of_attention = re.compile(rf"(?:{re.escape(attention)}|{re.escape(first_norm)})(?:\.|$)")
    pieces: list[TracePiece] = []
    key: tuple[int, str, int, int | None, str] = (1, "forward", 0, None, "")
    freed = {event.storage: event.step for event in trace.events if isinstance(event, Free)}
    alive = start = most = sent = saved = lasting = first = micro = 0
    phase = "forward"
    for index, event in enumerate(trace.events):
        block, part = _at_work(event, key, place, of_attention)
        if event.phase != phase:
            micro = 0 if event.phase == "step" else micro + (event.phase == "forward" and phase == "backward")
            phase = event.phase
        if event.step != key[0]:
            micro = 0
        then = (event.step, event.phase, micro, block, part)
        if then != key:
            pieces.append(TracePiece(*key, start, most, alive, sent, saved, lasting, first, index))
            key, start, most, sent, saved, lasting, first = then, alive, alive, 0, 0, 0, index
        if isinstance(event, Alloc):
            storage = trace.storages[event.storage]
            alive += storage.bytes
            saved += storage.bytes if storage.category == "saved" else 0
            lasting += storage.bytes if freed.get(event.storage, event.step + 1) > event.step else 0
            most = max(most, alive)
        elif isinstance(event, Free):
            alive -= trace.storages[event.storage].bytes
        elif isinstance(event, Collective):
            sent += event.sent
    pieces.append(TracePiece(*key, start, most, alive, sent, saved, lasting, first, len(trace.events)))
    return pieces


def _at_work(
    event: Event, key: tuple[int, str, int, int | None, str], place: re.Pattern[str], of_attention: re.Pattern[str]
) -> tuple[int | None, str]:
    """(block, part) at work when the event happens; only operators say so, and those without a module do not."""
    block, part = key[3], key[4]
    if event.phase != key[1] and event.phase in ("loss", "step"):
        block, part = None, ""
    if not isinstance(event, Op) or (event.phase == "backward" and not event.module) or event.phase == "step":
        return block, part
    found = place.match(event.module)
    if found is None:
        return None, ""
    number, below = int(found[1]), found[2]
    if below is None:
        return (block, part) if block == number else (number, "attention")
    return number, "attention" if of_attention.match(below) else "mlp"
