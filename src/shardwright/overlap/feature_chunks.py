"""Y in feature chunks: each is reduce-scattered over k while the product of the next one is formed.

| a feature chunk: w of the features of Y_i | alive                       | until                    |
|-----------------------------------|-----------------------------|--------------------------|
| formed, by pieces of tokens       | [T,w], leased               | all its tokens are there |
| on its way                        | [T,w] and its landing [S,w] | the next one is formed   |
| landed                            | columns of Y_i [S,N'_i]     |                          |

A feature chunk that is all of Y_i lands in Y_i itself. All feature chunks of a linear are one logical reduce-scatter of
the trace. Sums run in blocking's order over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.comm.coalesced import CoalescedReduceScatterHandle, Logged
from shardwright.comm.collectives import all_reduce
from shardwright.overlap.pieces import TokenPiece, cut_features
from shardwright.overlap.work import Forward
from shardwright.runtime.reduction import lease_partial


@dataclass(eq=False)
class FeatureChunk:
    """Features ``columns`` of Y_index; whole: [T,w], from its first rows until it lands."""

    index: int
    columns: slice
    whole: torch.Tensor | None = None


class FeatureChunks:
    """Y_i [S,N'_i] of one forward, reduced over the k axes. ``send`` each feature chunk when it is formed; then
    ``finish``.
    """

    def __init__(self, work: Forward, mode: str):
        self.product, self.mode, self._rows = work.product, mode, work.rows
        self._weights, _ = work.lease()
        start, stop = self.product.scatter_y.bounds(work.rows)
        self._outputs = [work.x.new_empty(stop - start, weight.shape[0]) for weight in self._weights]
        self._logged = [Logged() for _ in self._weights]
        self.feature_chunks = [
            FeatureChunk(index, columns)
            for index, weight in enumerate(self._weights)
            for columns in cut_features(weight.shape[0], self.product.resolved.feature_chunks)
        ]
        self._travelling: tuple[CoalescedReduceScatterHandle, FeatureChunk, torch.Tensor] | None = None

    def multiply(self, feature_chunk: FeatureChunk, x: torch.Tensor, piece: TokenPiece) -> None:
        """The feature chunk's rows of ``piece``, of those rows x [r,K'] of X."""
        weight = self._weights[feature_chunk.index][feature_chunk.columns]
        if feature_chunk.whole is None:
            shape, owner = (self._rows, weight.shape[0]), f"{self.product.name} (Y)"
            feature_chunk.whole = lease_partial(self.product.runtime, shape, x, owner, False)
        torch.mm(x, weight.t(), out=feature_chunk.whole[piece.rows])

    def send(self, feature_chunk: FeatureChunk) -> None:
        """The feature chunk is formed: the one before it lands, and its own reduction begins."""
        self._land()
        product, whole, y = self.product, feature_chunk.whole, self._outputs[feature_chunk.index]
        assert whole is not None
        part = y if whole.shape[1] == y.shape[1] else y.new_empty(y.shape[0], whole.shape[1])
        logged = self._logged[feature_chunk.index]
        handle = CoalescedReduceScatterHandle(
            [(whole, part)], product.scatter_y, product.name, self.mode, product.wide, logged
        )
        self._travelling = handle, feature_chunk, part

    def _land(self) -> None:
        if self._travelling is None:
            return
        (handle, feature_chunk, part), self._travelling = self._travelling, None
        handle.finish()
        if feature_chunk.whole is not None:
            self.product.runtime.arena.end(feature_chunk.whole)
        feature_chunk.whole = None
        y = self._outputs[feature_chunk.index]
        if part is not y:
            y[:, feature_chunk.columns].copy_(part)

    def finish(self) -> list[torch.Tensor]:
        """Every Y_i, when the last feature chunk has landed; all-reduced where some of the k axes leave Y whole."""
        self._land()
        for y in self._outputs:
            all_reduce(y, self.product.reduce_y, self.product.name, self.product.wide)
        return self._outputs
