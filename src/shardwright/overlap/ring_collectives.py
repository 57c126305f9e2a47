"""What travels around a ring: pieces of an operand that every rank needs, and sums to which every rank adds its share.

Rank r sends to r + 1 and receives from r − 1. A part of T/n tokens is cut into ``chunks`` pieces; pieces of one sort
take two buffers, one being read and one filling, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwright import trace
from shardwright.comm.exchange import log, pass_along
from shardwright.comm.groups import AxisGroup
from shardwright.comm.waits import await_work
from shardwright.overlap.pieces import TokenPiece, cut_tokens, input_gradient
from shardwright.overlap.product import Product
from shardwright.overlap.work import Backward, Forward


class RingAllGather:
    """Every rank's pieces come by, the own one first, then those of the ranks before (pieces.cut_tokens's order).

    ``take()`` gives the rows whose turn it is, already on their way to the next rank; ``pass_on()`` ends the turn when
    they have left and the next ones are here. The own part is read where it lies. rows: T.
    """

    def __init__(
        self, part: torch.Tensor, rows: int, product: Product, group: AxisGroup, chunks: int, mode: str, what: str
    ):
        self.group, self.mode, self.name = group, mode, product.name
        self.turns = cut_tokens(rows, group, chunks)
        self._arena = product.runtime.arena
        self._part = part.contiguous()
        self._first, _ = group.bounds(rows)
        low, high = group.bounds(rows, (group.index + 1) % group.size)
        row_bytes = part.shape[1] * part.element_size()
        log("all_gather", group, rows * row_bytes, part.nbytes, product.name, mode, (high - low) * row_bytes)
        shape = (max(piece.stop - piece.start for piece in self.turns), part.shape[1])
        owner, count = f"{product.name} ({what})", 2 if len(self.turns) > 2 else 1
        self._buffers = [self._arena.lease(shape, part.dtype, part.device, "gathered", owner) for _ in range(count)]
        self._turn = 0
        self._works: list[dist.Work] = []

    def take(self) -> torch.Tensor:
        """The rows of ``turns[turn]`` [r,width]; they travel on and the next ones come in meanwhile."""
        n, me, turn = self.group.size, self.group.index, self._turn
        rows = self._rows(turn)
        outgoing = rows if self.turns[turn].peer != (me + 1) % n else None  # the next rank began with its own piece
        more = turn + 1 < len(self.turns) and self.turns[turn + 1].peer != me
        self._works += pass_along(outgoing, self._rows(turn + 1) if more else None, self.group)
        self._turn += 1
        return rows

    def _rows(self, turn: int) -> torch.Tensor:
        piece = self.turns[turn]
        if piece.peer == self.group.index:
            return self._part[piece.start - self._first : piece.stop - self._first]
        return self._buffers[turn % len(self._buffers)][: piece.stop - piece.start]

    def pass_on(self) -> None:
        """Until this turn's rows have left and the next ones are here."""
        _finish(self._works, "all_gather", self.group, self.name)

    def end(self) -> None:
        """Gives the buffers back."""
        for buffer in self._buffers:
            self._arena.end(buffer)


class RingReduceScatter:
    """part ← this rank's part of a sum over ranks, whose pieces travel while shares are formed.

    The sum of rank q's piece starts at q + 1, gains a share at each rank, and ends at q. ``share(piece, out)`` writes
    this rank's share. Beside two buffers it needs room for one share: the rows of the result that are still to come.
    """

    def __init__(
        self,
        part: torch.Tensor,
        rows: int,
        product: Product,
        group: AxisGroup,
        chunks: int,
        mode: str,
        what: str,
        share: Callable[[TokenPiece, torch.Tensor], None],
    ):
        self.group, self.mode, self.name, self.share = group, mode, product.name, share
        self._arena = product.runtime.arena
        self._part = part
        self._first, _ = group.bounds(rows)
        own_last = cut_tokens(rows, group, chunks)
        # The same pieces in the same order, but each rank's own comes last: there its sum ends.
        n = group.size
        self.turns = [own_last[sub * n + (step + 1) % n] for sub in range(chunks) for step in range(n)]
        log("reduce_scatter", group, rows * part.shape[1] * part.element_size(), part.nbytes, product.name, mode)
        shape = (max(piece.stop - piece.start for piece in self.turns), part.shape[1])
        owner = f"{product.name} ({what})"
        self._buffers = [self._arena.lease(shape, part.dtype, part.device, "unreduced", owner) for _ in range(2)]
        self._spare = None if self._fits() else part.new_empty(shape)
        self._turn = 0
        self._works: list[dist.Work] = []

    def _fits(self) -> bool:
        """Whether every share finds room in the result (parts that do not divide may not)."""
        n = self.group.size
        return all(
            max(piece.stop - piece.start for piece in self.turns[sub : sub + n])
            <= len(self._part) - (self.turns[sub + n - 1].start - self._first)
            for sub in range(0, len(self.turns), n)
        )

    def step(self) -> None:
        """One turn: the share of a piece is formed, joins the sum that has come by, and the sum travels on."""
        n, me, turn = self.group.size, self.group.index, self._turn
        piece = self.turns[turn]
        size = piece.stop - piece.start
        total = self._buffers[turn % 2][:size]
        if turn % n == 0:
            self.share(piece, total)
            self._arrived()
        else:
            room = self._room(turn, size)
            self.share(piece, room)
            self._arrived()
            if piece.peer == me:
                room.add_(total)
            else:
                total.add_(room)
        self._turn += 1
        if piece.peer != me:
            following = self.turns[turn + 1]
            coming = self._buffers[(turn + 1) % 2][: following.stop - following.start]
            self._works += pass_along(total, coming, self.group)

    def _room(self, turn: int, size: int) -> torch.Tensor:
        own = self.turns[turn - turn % self.group.size + self.group.size - 1]
        start = own.start - self._first
        if self.turns[turn].peer == self.group.index or self._spare is None:
            return self._part[start : start + size]
        return self._spare[:size]

    def _arrived(self) -> None:
        _finish(self._works, "reduce_scatter", self.group, self.name)

    def end(self) -> None:
        """Gives the buffers back."""
        self._arrived()
        for buffer in self._buffers:
            self._arena.end(buffer)


def _finish(works: list[dist.Work], kind: str, group: AxisGroup, module: str) -> None:
    if works:
        trace.waited(kind, group.axes, module)
    for work in works:
        await_work(work, group)
    works.clear()


def reduced_products(work: Forward, chunks: int, mode: str) -> list[torch.Tensor]:
    """Y_i [T/n,N_i] = this rank's rows of Σ_ranks X W_iᵀ, X [T,K']: a product of a piece beside the sum of the last."""
    product, x = work.product, work.x
    start, stop = product.scatter_y.bounds(work.rows)
    weights, _ = work.lease()
    outputs = []
    for weight in weights:
        y = x.new_empty(stop - start, weight.shape[0])

        def share(piece: TokenPiece, out: torch.Tensor, weight: torch.Tensor = weight) -> None:
            torch.mm(x[piece.rows], weight.t(), out=out)

        total = RingReduceScatter(y, work.rows, product, product.scatter_y, chunks, mode, "Y", share)
        for _ in total.turns:
            total.step()
        total.end()
        outputs.append(y)
    return outputs


def multiply_back(
    grads: Sequence[torch.Tensor | None],
    work: Backward,
    piece: TokenPiece,
    weights: Sequence[torch.Tensor],
    dx: torch.Tensor | None,
) -> None:
    """A row site's dX [T,K'][piece] and its share of dW, from rows dY_i [r,N_i] and X [T,K']."""
    if dx is not None:
        input_gradient(grads, weights, dx[piece.rows])
    if work.into is not None:
        work.into.add(grads, work.kept[piece.rows] if work.kept is not None else None)
