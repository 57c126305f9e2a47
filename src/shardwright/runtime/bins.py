"""Bins: small gradients of one element type and one set of ranks share a buffer, and are reduced as one.

One bin (bin.py) fills while at most one travels (bin_reduction.py); a bin is half a cap.

| when                               | memory, of a cap                                                   |
|------------------------------------|--------------------------------------------------------------------|
| a gradient opens a bin             | ½                                                                  |
| it is full, or the next has no room| it travels: + 1/(2N) for each arrival awaited, of which there are 2|
| the next one fills meanwhile       | + ½                                                                |
| flushed                            | 0                                                                  |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.comm.groups import AxisGroup
from shardwright.errors import InputError
from shardwright.runtime.arena import Arena
from shardwright.runtime.bin import Bin, BinPiece, lane_length
from shardwright.runtime.bin_reduction import MODULE, BinReduction, reduction_of
from shardwright.spec.mesh import chunk


class Bins:
    """The bins of one (ranks, element type, device): see Runtime.bucket. They hold no memory between flushes.

    Every rank of the group must add the same gradients in the same order, and flush where the others do.
    """

    def __init__(self, group: AxisGroup, dtype: torch.dtype, device: torch.device, arena: Arena):
        self.group, self.dtype, self.device = group, dtype, device
        self._arena = arena
        self._filling: Bin | None = None
        self._travelling: tuple[Bin, BinReduction] | None = None
        self._expected = 0

    @property
    def busy(self) -> bool:
        """Whether something was added and is not reduced yet."""
        return self._filling is not None or self._travelling is not None

    def lanes(self, kind: str) -> int:
        """Into how many parts a gradient is cut."""
        return self.group.size if kind == "reduce_scatter" else 1

    def padded_bytes(self, shape: Sequence[int], kind: str) -> int:
        """Bytes that a gradient of ``shape`` takes in a bin."""
        lanes = self.lanes(kind)
        return lanes * lane_length(shape, lanes) * self.dtype.itemsize

    def room(self, cap: int, kind: str) -> int:
        """Bytes of gradients that a bin of half a cap has room for."""
        row = self.lanes(kind) * self.dtype.itemsize
        return cap // 2 // row * row

    def expect(self, padded: int) -> None:
        """So many padded bytes more will come before the next flush: no bin is larger than what is still to come.

        Without it every bin is half a cap. What comes beyond what was expected opens bins of its own size.
        """
        self._expected += padded

    @torch.no_grad()
    def add(
        self,
        gradient: torch.Tensor,
        destination: torch.Tensor,
        cap: int,
        kind: str = "reduce_scatter",
        total: torch.dtype | None = None,
        landed: Callable[[], None] | None = None,
    ) -> None:
        """Copies ``gradient`` [rows, …] into a bin; when that has travelled its sum is added to ``destination``.

        destination: contiguous; this rank's ⌈rows/N⌉ rows (all rows, for kind ``all_reduce``), zero or an earlier sum.
        For kind ``all_reduce`` it may be the gradient itself, which becomes the sum.
        cap: bytes; a bin that this gradient opens is half of it. total: the element type of the sum, by default the
        destination's. landed: called when the sum is there.

        Raises InputError where the destination has another shape or gaps, where the gradient is larger than a bin, and
        where ``total`` is more than twice as wide as what travels.
        """
        lanes, wide = self.lanes(kind), total if total != destination.dtype else None
        length = lane_length(gradient.shape, lanes)
        self._check(gradient, destination, cap, kind, wide)
        if self.group.size == 1 and destination is not gradient:
            destination.add_(gradient)
        if self.group.size == 1 or not length:
            if landed is not None:
                landed()
            return
        while self._filling is not None and not self._filling.admits(kind, wide, length):
            self._launch()
        padded = self.padded_bytes(gradient.shape, kind)
        filling = self._filling or self._open(padded, cap, kind, wide)
        self._expected = max(0, self._expected - padded)
        piece = BinPiece(length, destination.detach().view(-1), landed)
        filling.take(gradient if gradient.dim() else gradient.view(1), piece)
        if destination is gradient:
            destination.zero_()
        if filling.used == filling.length:
            self._launch()

    def _check(
        self, gradient: torch.Tensor, destination: torch.Tensor, cap: int, kind: str, wide: torch.dtype | None
    ) -> None:
        shape = tuple(gradient.shape)
        if kind == "reduce_scatter":
            if not shape:
                raise InputError("gradient: found a scalar; allowed: one with rows, or kind all_reduce")
            start, stop = chunk(shape[0], self.group.size, self.group.index)
            shape = (stop - start, *shape[1:])
        if tuple(destination.shape) != shape or not destination.is_contiguous():
            gaps = "" if destination.is_contiguous() else " with gaps"
            raise InputError(
                f"destination: found shape {tuple(destination.shape)}{gaps}; allowed: {shape} without gaps, this "
                f"rank's part of a gradient of shape {tuple(gradient.shape)}"
            )
        if self.padded_bytes(gradient.shape, kind) > cap // 2:
            raise InputError(
                f"gradient: found {self.padded_bytes(gradient.shape, kind)} B, padded; allowed: {cap // 2} B, half of "
                "the cap"
            )
        if wide is not None and wide.itemsize > 2 * self.dtype.itemsize:
            raise InputError(
                f"reduce_dtype: found {wide} for gradients that travel as {self.dtype}; allowed: at most twice as "
                "wide, or destinations of that type"
            )

    def _open(self, padded: int, cap: int, kind: str, total: torch.dtype | None) -> Bin:
        room = self.room(cap, kind)
        size = min(room, max(padded, self._expected)) if self._expected else room
        lanes = self.lanes(kind)
        shape = (lanes, size // (lanes * self.dtype.itemsize))
        self._filling = Bin(kind, total, self._arena.lease(shape, self.dtype, self.device, "bucket", MODULE))
        return self._filling

    @torch.no_grad()
    def send(self) -> None:
        """What was added travels now, though the bin is not full."""
        if self._filling is not None:
            self._launch()

    def _launch(self) -> None:
        """What fills travels; what travelled before has landed then."""
        full, self._filling = self._filling, None
        while self._travelling is not None:  # a ``landed`` call may have added more, and that may travel
            self._land(keep=True)
        if full is not None:
            self._travelling = full, reduction_of(full, self.group, self._arena)

    def _land(self, keep: bool) -> None:
        if self._travelling is None:
            return
        full, handle = self._travelling
        self._travelling = None
        handle.finish(keep)
        for piece in full.pieces:
            if keep and piece.landed is not None:
                piece.landed()

    @torch.no_grad()
    def advance(self) -> None:
        """Takes in what is next to arrive, and lets what follows travel."""
        if self._travelling is not None:
            self._travelling[1].advance()

    @torch.no_grad()
    def flush(self) -> None:
        """Until every sum is in its destination. All memory is given back."""
        while self.busy:
            self._launch()
        self._expected = 0

    @torch.no_grad()
    def abandon(self) -> None:
        """Drops everything; what travels is let through, for the other ranks.

        Destinations of what had not landed hold parts of sums, or nothing.
        """
        self._land(keep=False)
        if self._filling is not None:
            self._arena.end(self._filling.buffer)
        self._filling, self._expected = None, 0
