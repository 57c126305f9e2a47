"""Embeddings: of tokens, vocabulary-parallel, and of positions.

The embedding of tokens is a row-parallel site whose X is the one-hot matrix of the tokens: K is the vocabulary. Each
rank looks up the tokens of its own rows; the parts are summed.

| pass     | in                        | out                                                            |
|----------|---------------------------|----------------------------------------------------------------|
| forward  | ids [B,S], W [V_local,h]  | partial [T,h], zero for tokens of other ranks; then reduced    |
| backward | dY [T,h] (gathered)       | dW [V_local,h], partial over the axes that split the tokens    |

Positions are looked up for this rank's tokens only, in a table that every rank holds whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.comm.groups import AxisGroup
from shardwright.layers.classes import check_classes
from shardwright.overlap.product import Product
from shardwright.params.parameter_group import Use
from shardwright.params.stored import StoredParameter
from shardwright.reshard.carrier import Carrier, TokenShape
from shardwright.runtime.reduction import reduce_output


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Any,
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
        if not product.splits_k:
            return weight[flat]
        arena = product.runtime.arena
        local = flat - first
        foreign = (local < 0) | (local >= ctx.rows)
        shape = (flat.shape[0], weight.shape[1])
        y = arena.lease(shape, weight.dtype, weight.device, "unreduced", f"{product.name} (Y)")
        if not ctx.rows:  # a rank behind the end of a vocabulary that does not divide
            return y.zero_()
        torch.index_select(weight, 0, local.masked_fill_(foreign, 0), out=y)
        y.masked_fill_(foreign.unsqueeze(-1), 0)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        (ids,) = ctx.saved_tensors
        rows, flat = ctx.rows, ids.reshape(-1)
        if ctx.product.splits_k or ctx.padding is not None:
            local = flat - ctx.first
            nobody = (local < 0) | (local >= rows)
            if ctx.padding is not None:
                nobody |= flat == ctx.padding
            # What adds to no row here goes to one behind the last: CUDA's kernel has room for as many rows as it is
            # told of, and dY may be another node's, too, so that it cannot be set to zero.
            local.masked_fill_(nobody, rows)
            gradient = torch.ops.aten.embedding_dense_backward(dy, local, rows + 1, -1, False)[:rows]
        else:
            gradient = torch.ops.aten.embedding_dense_backward(dy, flat, rows, -1, False)
        ctx.product.runtime.arena.end(dy)
        ctx.stored.deposit(gradient)
        ctx.stored.finish(ctx.use)
        return (None,) * 7


class VocabParallelEmbedding(nn.Module):
    """Token ids [B,S] → hidden states, as a carrier [B,S,h] of this rank's tokens [1,T_local,h].

    stored: W [V,h], its rows split by the layout's k axes, its columns by n. T_local is B·S, over the ranks of
    ``sequences`` (m axes that split sequences: each looks up its own tokens), and over k where the layout scatters Y.
    scale: multiplies the result (Gemma).
    """

    def __init__(
        self,
        stored: StoredParameter,
        product: Product,
        first_row: int,
        padding_idx: int | None = None,
        scale: float | None = None,
        sequences: AxisGroup | None = None,
    ):
        super().__init__()
        self.weight = stored.parameter
        self.stored, self.product = stored, product
        self.sequences = sequences or product.runtime.group(())
        self.first_row, self.padding_idx, self.scale = first_row, padding_idx, scale

    def stored_parameters(self) -> list[StoredParameter]:
        """How the parameters are stored."""
        return [self.stored]

    def forward(self, ids: torch.Tensor) -> Carrier:
        """ids [B,S] → a carrier [B,S,h].

        Raises InputError for an id that names no row of W (on a device, an assertion that says so).
        """
        check_classes("input_ids", ids, self.weight.shape[0])
        product, start, stop = self.product, *self.sequences.bounds(ids.numel())
        mine = ids if self.sequences.size == 1 else ids.reshape(-1)[start:stop]
        y = _Lookup.apply(
            self.stored.anchor, self.stored, self.stored.use(), mine, self.first_row, product, self.padding_idx
        )
        y = reduce_output(y, product.reduction)
        if self.scale is not None:
            y = y * self.scale
        return Carrier(y.unsqueeze(0), *ids.shape)


class _PositionLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Any, stored: StoredParameter, use: Use | None, positions: torch.Tensor
    ) -> torch.Tensor:
        table = stored.lease()
        ctx.stored, ctx.use, ctx.rows = stored, use, table.shape[0]
        ctx.save_for_backward(positions)
        return table[positions]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (positions,) = ctx.saved_tensors
        gradient = torch.ops.aten.embedding_dense_backward(grads[0], positions, ctx.rows, -1, False)
        ctx.stored.deposit(gradient)
        ctx.stored.finish(ctx.use)
        return (None,) * 4


class PositionEmbedding(nn.Module):
    """Position ids [1,S] → the embeddings of this rank's tokens, as a carrier [B,S,h].

    stored: the table [P,h], cut as the features of hidden states are; its gradient is partial over all axes that split
    tokens. split: the group over which B·S tokens are split. shape: tells B of the forward at work.
    """

    def __init__(self, stored: StoredParameter, split: AxisGroup, shape: TokenShape):
        super().__init__()
        self.weight = stored.parameter
        self.stored, self.split, self.shape = stored, split, shape

    def stored_parameters(self) -> list[StoredParameter]:
        """How the parameters are stored."""
        return [self.stored]

    def forward(self, position_ids: torch.Tensor) -> Carrier:
        """position_ids [1,S] → a carrier [B,S,h]."""
        batch, sequence = self.shape.batch, self.shape.sequence
        start, stop = self.split.bounds(batch * sequence)
        positions = position_ids.expand(batch, sequence).reshape(-1)[start:stop]
        tokens = _PositionLookup.apply(self.stored.anchor, self.stored, self.stored.use(), positions)
        return Carrier(tokens.unsqueeze(0), batch, sequence)
