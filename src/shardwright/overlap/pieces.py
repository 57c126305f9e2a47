"""The products of a site, piece by piece: what every overlap mode multiplies, in the same order.

The order in which pieces are taken is the order in which a ring brings them: this rank's own part, then those of the
ranks before it. All modes add dW up in that order, so modes that cut alike agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwright.comm.groups import AxisGroup
from shardwright.spec.mesh import chunk

Deposit = Callable[[int, torch.Tensor | None, torch.Tensor | None], None]
"""(linear, its dW or None where W is frozen, its db or None) → the store."""


@dataclass(frozen=True)
class TokenPiece:
    """Rows [start, stop) of the tokens of all ranks; part of the rows that the group's member ``peer`` holds."""

    peer: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def cut_tokens(rows: int, group: AxisGroup, chunks: int) -> list[TokenPiece]:
    """``rows`` tokens over the group in ring order, each rank's part cut into ``chunks``; empty pieces included."""
    found = []
    for sub in range(chunks):
        for step in range(group.size):
            peer = (group.index - step) % group.size
            low, high = group.bounds(rows, peer)
            start, stop = chunk(high - low, chunks, sub)
            found.append(TokenPiece(peer, low + start, low + stop))
    return found


def whole(rows: int) -> list[TokenPiece]:
    """All tokens as one piece."""
    return [TokenPiece(0, 0, rows)]


def cut_features(width: int, feature_chunks: int) -> list[slice]:
    """``width`` features in that many feature chunks; empty ones left out, but there is one at least."""
    bounds = [chunk(width, feature_chunks, index) for index in range(feature_chunks)]
    return [slice(start, stop) for start, stop in bounds if start < stop] or [slice(0, width)]


def multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    rows: slice,
    feature_chunks: int = 1,
) -> None:
    """Y_i[rows] = x W_iᵀ (+ b_i), x [r,K'] being those rows of X; partial sums in that many feature chunks."""
    for weight, bias, y in zip(weights, biases, outputs, strict=True):
        if bias is not None:
            torch.addmm(bias, x, weight.t(), out=y[rows])
            continue
        for columns in cut_features(weight.shape[0], feature_chunks):
            torch.mm(x, weight[columns].t(), out=y[rows, columns])


def input_gradient(
    grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor], out: torch.Tensor | None
) -> torch.Tensor:
    """dX [r,K'] = Σ dY_i W_i of rows dY_i [r,N'_i]; into ``out`` where given. At least one dY_i is not None."""
    pairs = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    (grad, weight), *rest = pairs
    dx = torch.mm(grad, weight) if out is None else torch.mm(grad, weight, out=out)
    for grad, weight in rest:
        dx.addmm_(grad, weight)
    return dx


class WeightGradients:
    """dW_i [N'_i,K'] = Σ_pieces dY_iᵀ X (transposed: [K',N'_i]), and db_i [N'_i] = Σ_rows dY_i; then to the store.

    wanted: which of (dW_i, db_i) to form, for each linear.
    """

    def __init__(self, wanted: Sequence[tuple[bool, bool]], transposed: bool, deposit: Deposit):
        self.wanted, self.transposed, self.deposit = wanted, transposed, deposit
        self._dw: dict[int, torch.Tensor] = {}
        self._db: dict[int, torch.Tensor] = {}

    def add(self, grads: Sequence[torch.Tensor | None], x: torch.Tensor | None) -> None:
        """Adds rows dY_i [r,N'_i] and the same rows of X [r,K'] (None where no dW is wanted)."""
        for index, grad in enumerate(grads):
            if grad is not None:
                self._add_one(index, grad, x)

    def _add_one(self, index: int, grad: torch.Tensor, x: torch.Tensor | None) -> None:
        weight, bias = self.wanted[index]
        if weight and x is not None:
            left, right = (x.t(), grad) if self.transposed else (grad.t(), x)
            if index in self._dw:
                self._dw[index].addmm_(left, right)
            else:
                self._dw[index] = torch.mm(left, right)
        if bias:
            if index in self._db:
                self._db[index].add_(grad.sum(0))
            else:
                self._db[index] = grad.sum(0)

    def all_at_once(self, grads: Sequence[torch.Tensor | None], x: torch.Tensor | None) -> None:
        """The only piece: each linear's gradients go to the store before the next one's are formed."""
        for index, grad in enumerate(grads):
            if grad is not None:
                self._add_one(index, grad, x)
                self._give(index)

    def finish(self) -> None:
        """Hands everything over."""
        for index in range(len(self.wanted)):
            self._give(index)

    def _give(self, index: int) -> None:
        dw, db = self._dw.pop(index, None), self._db.pop(index, None)
        if dw is not None or db is not None:
            self.deposit(index, dw, db)
