"""A carrier: a tensor that has the shape model code expects, [B,S,h], and holds this rank's tokens [1,T_local,h].

Model code reads shapes, builds positions from them, and passes the carrier on; the site that receives it takes the
tokens out. Its own storage is one element, seen through strides of 0.
"""

from __future__ import annotations

from typing import Any, cast

import torch


def carry(tokens: torch.Tensor, batch: int, sequence: int) -> torch.Tensor:
    """A carrier [batch, sequence, h] of ``tokens`` [1,T_local,h]."""
    carrier = tokens.new_empty(1).expand(batch, sequence, tokens.shape[-1])
    cast(Any, carrier).shardwright_tokens = tokens
    return carrier


def tokens_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tokens that a carrier holds; any other tensor is its own tokens."""
    tokens: torch.Tensor = getattr(tensor, "shardwright_tokens", tensor)
    return tokens
