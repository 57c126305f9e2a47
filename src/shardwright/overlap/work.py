"""What an overlap mode is given: one forward, or one backward, of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwright.overlap.pieces import WeightGradients
from shardwright.overlap.product import Product

Weights = list[torch.Tensor]
Biases = list[torch.Tensor | None]


@dataclass(frozen=True)
class Forward:
    """One forward on this rank.

    x: X as it came, [R,K'']. rows, width: T and K' of the X that is multiplied (product.shape_in tells R and K'').
    lease: waits for (W_i [N'_i,K'], b_i [N'_i] or None). keep: backward will want X. hold: takes over the gathered X,
    still leased, where backward is at work already (a replay).
    """

    product: Product
    x: torch.Tensor
    rows: int
    width: int
    lease: Callable[[], tuple[Weights, Biases]]
    keep: bool
    hold: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class Backward:
    """One backward on this rank.

    grads: dY_i [T,N'_i], or None; of a product that defers, as they come: [S,N'_i]. kept: what forward kept of X. held:
    the gathered X, where a replay has left it. lease: waits for W_i [N'_i,K']; release: nothing here reads them any
    more. needs_x: dX is wanted. into: where dW_i and db_i go.
    """

    product: Product
    grads: Sequence[torch.Tensor | None]
    kept: torch.Tensor | None
    rows: int
    width: int
    lease: Callable[[], Weights]
    release: Callable[[], None]
    needs_x: bool
    into: WeightGradients | None
    held: torch.Tensor | None = None

    @property
    def present(self) -> list[torch.Tensor]:
        """The dY_i that came."""
        return [grad for grad in self.grads if grad is not None]

    @property
    def gathers_again(self) -> bool:
        """X has to be gathered once more for dW."""
        gathered = self.product.gather_x.size > 1 and not self.product.keep_gathered
        return gathered and self.held is None and self.kept is not None
