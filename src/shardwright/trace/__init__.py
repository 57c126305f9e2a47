"""The step trace: the ordered record of what one rank does in a training step, and its readers.

``record`` makes a trace, for real or under fake tensors, with the same code; a Trace answers from its events and never
derives a number again. The runtime speaks to the active recorder through ``collective``, ``note``, ``released`` and
``span``; without a recorder these cost one look at torch's stack of dispatch modes.
"""

from shardwright.trace.events import CATEGORIES, PHASES, Alloc, Collective, Event, Free, Mark, Op, Storage, Wait
from shardwright.trace.recorder import Observer, plain
from shardwright.trace.recording import collector_at_rest, record
from shardwright.trace.reports import active, collective, note, quiet, released, renewed, span, unlogged, waited
from shardwright.trace.trace import Alive, Entry, Peak, Point, Trace

__all__ = [
    "CATEGORIES",
    "PHASES",
    "Alive",
    "Alloc",
    "Collective",
    "Entry",
    "Event",
    "Free",
    "Mark",
    "Observer",
    "Op",
    "Peak",
    "Point",
    "Storage",
    "Trace",
    "Wait",
    "active",
    "collective",
    "collector_at_rest",
    "note",
    "plain",
    "quiet",
    "record",
    "released",
    "renewed",
    "span",
    "unlogged",
    "waited",
]
