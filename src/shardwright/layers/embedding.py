"""Vocabulary-parallel embedding: each rank looks up the tokens of its own rows; the parts are summed.

It is a row-parallel site whose X is the one-hot matrix of the tokens: K is the vocabulary.

| pass     | in                      | out                                                            |
|----------|-------------------------|----------------------------------------------------------------|
| forward  | ids [B,S], W [V/n,h]    | partial [T,h], zero for tokens of other ranks; then reduced    |
| backward | dY [T,h] (gathered)     | dW [V/n,h], partial over the axes that split the tokens        |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.comm import reduce_output
from shardwright.linear.carrier import carry
from shardwright.linear.product import Product
from shardwright.params import StoredParameter, Use


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parameter: Any,
        stored: StoredParameter,
        use: Use | None,
        ids: torch.Tensor,
        first: int,
        product: Product,
        padding: int | None,
    ) -> torch.Tensor:
        weight = stored.lease()
        ctx.stored, ctx.use, ctx.first, ctx.padding, ctx.product = stored, use, first, padding, product
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(ids)
        flat = ids.reshape(-1)
        if product.reduce_y.size == 1:
            return weight[flat]
        arena = product.runtime.arena
        local = flat - first
        foreign = (local < 0) | (local >= ctx.rows)
        shape = (flat.shape[0], weight.shape[1])
        y = arena.lease(shape, weight.dtype, weight.device, "unreduced", f"{product.name} (Y)")
        torch.index_select(weight, 0, local.masked_fill_(foreign, 0), out=y)
        y.masked_fill_(foreign.unsqueeze(-1), 0)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        (ids,) = ctx.saved_tensors
        local = ids.reshape(-1) - ctx.first
        nobody = (local < 0) | (local >= ctx.rows)
        if ctx.padding is not None:
            nobody |= local == ctx.padding - ctx.first
        # An index equal to padding_idx adds nothing, so −1 marks the tokens of other ranks.
        local.masked_fill_(nobody, -1)
        gradient = torch.ops.aten.embedding_dense_backward(dy, local, ctx.rows, -1, False)
        ctx.product.runtime.arena.end(dy)
        ctx.stored.deposit(gradient, ctx.use)
        return (None,) * 7


class VocabParallelEmbedding(nn.Module):
    """Token ids [B,S] → hidden states, as a carrier [B,S,h] of this rank's tokens [1,T_local,h].

    stored: W [V,h], its rows split by the layout's k axes. T_local is B·S, over n where the layout scatters Y.
    """

    def __init__(self, stored: StoredParameter, product: Product, first_row: int, padding_idx: int | None = None):
        super().__init__()
        self.weight = stored.parameter
        self.stored, self.product = stored, product
        self.first_row, self.padding_idx = first_row, padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B,S] → a carrier [B,S,h]."""
        product = self.product
        y = _Lookup.apply(self.weight, self.stored, self.stored.use(), ids, self.first_row, product, self.padding_idx)
        y = reduce_output(y, product.runtime, product.reduce_y, product.y_word, product.name)
        return carry(y.unsqueeze(0), *ids.shape)
