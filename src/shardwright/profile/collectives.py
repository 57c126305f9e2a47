"""How long the runtime's own collectives take: by size of the message, alone and beside products.

They are measured as training runs them, over all groups of the mesh at once, which share links and processors.

``contention`` tells what a collective costs while every rank multiplies matrices. It is issued, products are formed
that take at least as long as it does alone, then it is waited for:

    contention = 1 + (seconds of both − seconds of the products alone) / seconds of the collective alone

1 is hidden entirely; 2 is as slow as one after the other (where, say, both need the same processors). It is the factor
by which both are slowed down for as long as both run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwright.comm.all_to_all import rows_to_columns
from shardwright.comm.collectives import AllReduceHandle
from shardwright.comm.exchange import AllGatherHandle, ReduceScatterHandle
from shardwright.comm.groups import AxisGroup
from shardwright.profile.fits import fit
from shardwright.profile.stopwatch import Stopwatch
from shardwright.spec.cluster import Measured
from shardwright.spec.collectives import sent_bytes

SLOW_SECONDS = 0.5
"""No message is larger than one that takes this long."""

ROWS = 16
"""Rows of what an all-to-all exchanges: its pieces are columns, copied before they are sent."""


@dataclass(frozen=True)
class Message:
    """One collective on tensors of its own. sent: bytes that this rank sends. begin: issues it, returns the wait."""

    sent: int
    begin: Callable[[], Callable[[], None]]

    def run(self) -> None:
        """Issues it and waits."""
        self.begin()()


def _all_gather(group: AxisGroup, sent: int, empty: Callable[..., torch.Tensor]) -> Message:
    part, whole = empty(1, _width(sent, group)), empty(group.size, _width(sent, group))
    size = sent_bytes("all_gather", group.size, whole.nbytes, part.nbytes)
    return Message(size, lambda: AllGatherHandle(part, whole, group, "profile", "async").finish)


def _reduce_scatter(group: AxisGroup, sent: int, empty: Callable[..., torch.Tensor]) -> Message:
    part, whole = empty(1, _width(sent, group)), empty(group.size, _width(sent, group))
    size = sent_bytes("reduce_scatter", group.size, whole.nbytes, part.nbytes)
    return Message(size, lambda: ReduceScatterHandle(whole, part, group, "profile", "async").finish)


def _all_reduce(group: AxisGroup, sent: int, empty: Callable[..., torch.Tensor]) -> Message:
    whole = empty(group.size * _width(sent // 2, group))
    size = sent_bytes("all_reduce", group.size, whole.nbytes, 0)
    return Message(size, lambda: AllReduceHandle(whole, group, "profile", "async").finish)


def _all_to_all(group: AxisGroup, sent: int, empty: Callable[..., torch.Tensor]) -> Message:
    width = _width(sent // ROWS, group)
    x = empty(ROWS, group.size * width)

    def begin() -> Callable[[], None]:
        rows_to_columns(x, ROWS * group.size, width, group, "profile")
        return lambda: None

    return Message(sent_bytes("all_to_all", group.size, x.nbytes * group.size, x.nbytes), begin)


def _width(sent: int, group: AxisGroup) -> int:
    """Elements that go to each other member, of four bytes or of two."""
    return max(1, sent // (group.size - 1) // 4)


MESSAGES: dict[str, Callable[[AxisGroup, int, Callable[..., torch.Tensor]], Message]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
"""Kind → a collective that sends about so many bytes, of tensors that the last argument makes."""

OVERLAPPED = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds that the runtime issues before it waits; the others never run beside a product."""


def measure(
    kind: str,
    group: AxisGroup,
    hosts: int,
    sizes: Sequence[int],
    watch: Stopwatch,
    multiply: Callable[[], object],
    product_seconds: float,
) -> Measured:
    """One kind over all groups like ``group``: the line through its times, and how it fares beside products.

    hosts: hosts that a group spans. sizes: bytes to send, smallest first. multiply: a product, which takes
    ``product_seconds`` while all ranks form it.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=watch.device)

    found: list[tuple[Message, float]] = []
    for size in sizes:
        message = MESSAGES[kind](group, size, empty)
        found.append((message, watch.seconds(message.run)))
        if found[-1][1] > SLOW_SECONDS:
            break
    line = fit([message.sent for message, _ in found], [seconds for _, seconds in found])
    contention = 1.0
    if kind in OVERLAPPED:
        contention = statistics.median(_contention(*pair, watch, multiply, product_seconds) for pair in found[-2:])
    return Measured(
        kind=kind,
        ranks=group.size,
        hosts=hosts,
        latency=line.latency,
        bandwidth=line.bandwidth,
        least=line.least,
        contention=contention,
        residual=line.residual,
    )


def _contention(
    message: Message, alone: float, watch: Stopwatch, multiply: Callable[[], object], product_seconds: float
) -> float:
    count = max(1, math.ceil(alone / product_seconds))

    def products() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        finish = message.begin()
        products()
        finish()

    multiplied = watch.seconds(products)
    return 1 + max(0.0, watch.seconds(both) - max(multiplied, alone)) / alone
