"""A bin: one buffer in which small gradients lie one behind the other, cut into the lanes that travel.

A gradient [rows, …] is cut as storage is, ⌈rows/N⌉ rows a rank: lane r of the buffer [N, length] holds what rank r will
own, one gradient after the other, padded to equal lengths. So a lane is what travels to one rank, in one message. An
all-reduced bin has one lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


def lane_length(shape: Sequence[int], lanes: int) -> int:
    """Elements that a gradient of ``shape`` takes in each of ``lanes`` lanes."""
    rows, *width = shape or (1,)
    return -(-rows // lanes) * math.prod(width)


@dataclass(frozen=True)
class BinPiece:
    """One gradient in a bin: ``length`` elements of every lane, of which this rank's are the first ``own``.

    destination: flat, [own]. landed: told when the sum is there.
    """

    length: int
    destination: torch.Tensor
    landed: Callable[[], None] | None

    @property
    def own(self) -> int:
        return self.destination.numel()


@dataclass
class Bin:
    """A buffer [lanes, length] that fills from the left.

    total: the element type of its sums, where destinations have another; None where sums form in the destinations.
    """

    kind: str
    total: torch.dtype | None
    buffer: torch.Tensor
    pieces: list[BinPiece] = field(default_factory=list)
    used: int = 0

    @property
    def length(self) -> int:
        return self.buffer.shape[1]

    def admits(self, kind: str, total: torch.dtype | None, length: int) -> bool:
        """Whether a gradient that is reduced in this way has room."""
        return (kind, total) == (self.kind, self.total) and self.used + length <= self.length

    @property
    def lanes(self) -> torch.Tensor:
        """What is filled: [lanes, used]."""
        return self.buffer[:, : self.used]

    def take(self, gradient: torch.Tensor, piece: BinPiece) -> None:
        """Copies the gradient behind what is there, each rank's rows into its lane."""
        place = self.buffer[:, self.used : self.used + piece.length]
        self.pieces.append(piece)
        self.used += piece.length
        rows, *width = gradient.shape
        each = -(-rows // place.shape[0])
        whole = rows // each  # lanes that get their full share; one more may get less, and the others nothing
        place = place.unflatten(1, (each, *width))
        place[:whole].copy_(gradient[: whole * each].unflatten(0, (whole, each)))
        if rows % each:
            place[whole, : rows % each].copy_(gradient[whole * each :])

    def land(self, lane: torch.Tensor) -> None:
        """Adds this rank's elements of a lane [used] to the destinations."""
        sizes = [size for piece in self.pieces for size in (piece.own, piece.length - piece.own)]
        targets, parts = [piece.destination for piece in self.pieces], lane.split(sizes)[::2]
        if self.apart:
            torch._foreach_add_(targets, parts)
        else:  # one call would add several parts to one destination at once
            for target, part in zip(targets, parts, strict=True):
                target.add_(part)

    @property
    def apart(self) -> bool:
        """Whether no two gradients have one destination."""
        places = {(id(each.destination.untyped_storage()), each.destination.storage_offset()) for each in self.pieces}
        return len(places) == len(self.pieces)
