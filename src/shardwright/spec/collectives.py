"""The kinds of collectives: what a rank sends, and which way the bytes go. A new kind is a line of ``COLLECTIVES``.

The file that runs it is in ``comm/``, and logs itself by its name here. Cluster files, the trace and the machine
(``simulate/machine.py``, whose table tells what the ways cost) know the kinds of this table and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Sent = Callable[[int, int, int], int]
"""(ranks, bytes of the full tensor, bytes of the own part) → bytes that this rank sends."""

Moved = Callable[[int, int, int], int]
"""(ranks, bytes of the full tensor, bytes that this rank sends) → bytes that the busiest rank sends."""

DIRECT, CARD_RINGS, AROUND = "direct", "card rings", "around"
"""Ways: to every other rank by itself; rings through every device of a host, each with its own network card; one ring,
which leaves a host once.
"""


def _as_told(ranks: int, whole: int, sent: int) -> int:
    return sent


def _cut_evenly(ranks: int, whole: int, sent: int) -> int:
    """As cut evenly or as this rank does, whichever is more."""
    return max(sent, whole * (ranks - 1) // ranks)


def _of_the_root(ranks: int, whole: int, sent: int) -> int:
    return whole


@dataclass(frozen=True)
class CollectiveKind:
    """sent, moved: as above. ways: backend → way. trips: how often a message crosses the tree of hosts and devices."""

    sent: Sent
    ways: Mapping[str, str]
    moved: Moved = _as_told
    trips: int = 1


_GATHERS = {"gloo": DIRECT, "nccl": CARD_RINGS}

COLLECTIVES: dict[str, CollectiveKind] = {
    "all_gather": CollectiveKind(lambda n, whole, own: own * (n - 1), _GATHERS, _cut_evenly),
    "reduce_scatter": CollectiveKind(lambda n, whole, own: whole - own, _GATHERS, _cut_evenly),
    "all_reduce": CollectiveKind(
        lambda n, whole, own: 2 * whole * (n - 1) // n, {"gloo": AROUND, "nccl": CARD_RINGS}, trips=2
    ),
    "all_to_all": CollectiveKind(lambda n, whole, own: own * (n - 1) // n, {"gloo": DIRECT, "nccl": DIRECT}),
    "broadcast": CollectiveKind(lambda n, whole, own: whole, {"gloo": AROUND, "nccl": AROUND}, _of_the_root),
}
"""Kind, by the name of the trace → what is known of it."""


def sent_bytes(kind: str, ranks: int, whole_bytes: int, own_bytes: int, last_bytes: int | None = None) -> int:
    """What this rank sends. last_bytes: of an all-gather as a ring, the next rank's part, which alone stays here."""
    if last_bytes is not None:
        return whole_bytes - last_bytes
    return COLLECTIVES[kind].sent(ranks, whole_bytes, own_bytes)
