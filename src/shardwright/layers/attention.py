"""Causal attention over this rank's heads, registered with Hugging Face under a name of our own.

Hugging Face's own entries build masks and expand keys when they see fake tensors, and not when they see real ones; an
entry without a mask function is called the same way in both. It therefore does causality itself, and what it cannot do
is refused before the step begins (see models/): padding masks, packed positions, attention dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

NAME = "shardwright"


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B,H,S,d], key and value [B,H_kv,S,d] with H a multiple of H_kv → [B,S,H,d].

    Saves query, key, value, the result, and one fp32 number a row (flash attention); never the S×S scores.
    """
    shared = query.shape[1] != key.shape[1]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
    )
    return mixed.transpose(1, 2), None


def register() -> str:
    """Makes ``causal_attention`` known to Hugging Face; returns the name to give a config."""
    AttentionInterface.register(NAME, causal_attention)
    return NAME
