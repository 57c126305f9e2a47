"""What the runtime reports to the recorder that watches it, if any: collectives, waits, memory that comes and goes.

Without a recorder each of these costs one look at torch's stack of dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwright.trace.events import Collective, Wait
from shardwright.trace.recorder import Recorder


def active() -> Recorder | None:
    """The innermost recorder at work, or None."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, Recorder):
            return mode
    return None


def collective(
    kind: str,
    axes: tuple[str, ...],
    ranks: tuple[int, ...],
    size: int,
    sent: int,
    mode: str = "blocking",
    module: str = "",
) -> Callable[[int, int], None] | None:
    """One logical collective is issued now. ``size`` and ``sent`` in bytes, as in events.Collective.

    Returns how to write down that more has joined it: (size, sent) → None, of everything so far.
    """
    recorder = active()
    if recorder is None or recorder.unlogged:
        return None
    recorder.arrive()
    where, events, place = module or recorder.module(), recorder.events, len(recorder.events)
    event = Collective(recorder.step, recorder.phase, where, kind, axes, ranks, size, sent, mode)
    events.append(event)

    def grow(size: int, sent: int) -> None:
        events[place] = replace(event, size=size, sent=sent)

    return grow


def waited(kind: str, axes: tuple[str, ...], module: str = "") -> None:
    """The program waits now for a collective of ``kind`` over ``axes``, or for a part of it."""
    recorder = active()
    if recorder is not None and not recorder.unlogged:
        recorder.arrive()
        where = module or recorder.module()
        recorder.events.append(Wait(recorder.step, recorder.phase, where, kind, axes))


def note(tensor: torch.Tensor, category: str) -> None:
    """Tells the category of a tensor's storage."""
    recorder = active()
    if recorder is not None:
        recorder.note(tensor, category)


def released(tensor: torch.Tensor) -> None:
    """The tensor's memory is given back now."""
    recorder = active()
    if recorder is not None:
        recorder.released(tensor)


def renewed(tensor: torch.Tensor, category: str) -> None:
    """The tensor's memory, released before, is there again."""
    recorder = active()
    if recorder is not None:
        recorder.renewed(tensor, category)


@contextmanager
def unlogged() -> Iterator[None]:
    """Collectives inside are parts of one that has been logged already."""
    recorder = active()
    if recorder is None:
        yield
        return
    recorder.unlogged += 1
    try:
        yield
    finally:
        recorder.unlogged -= 1


@contextmanager
def quiet() -> Iterator[None]:
    """Operators inside belong to a check, not to the step; no recorder writes them down."""
    recorder = active()
    if recorder is None:
        yield
    else:
        with recorder.quietly():
            yield


@contextmanager
def span(phase: str) -> Iterator[None]:
    """What runs inside, and until backward starts, is phase ``loss``."""
    if phase != "loss":
        raise ValueError(f"span: found {phase!r}; allowed: loss")
    recorder = active()
    if recorder is not None:
        recorder._in_loss = True
        recorder.arrive()
    yield
