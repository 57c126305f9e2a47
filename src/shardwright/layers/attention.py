"""Causal attention over this rank's heads, registered with Hugging Face under a name of our own.

Hugging Face's own entries build masks and expand keys when they see fake tensors, and not when they see real ones; an
entry without a mask function is called the same way in both. It therefore does causality and windows itself. What it
is told beside them is refused by name, unless it is known to change nothing here.

| case                       | how                                        | saved for backward                        |
|----------------------------|--------------------------------------------|-------------------------------------------|
| causal                     | torch's fused attention                    | q, k, v, the result, one number a row     |
| window shorter than S      | the same, with one [S,S] mask of booleans  | the same, and the mask                    |
| soft-capped scores, dropout| eager attention                            | a few [B,H,S,S] tensors                   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from transformers import AttentionInterface

from shardwright.errors import InputError

NAME = "shardwright"

UNREAD = ("position_ids", "shift_labels", "num_items_in_batch", "labels", "return_dict")
"""Keywords of the whole forward pass that models hand down to attention, which acts on none of them."""

OFF = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")
"""Keywords that may say that something is not asked for."""


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """query [B,H,S,d], key and value [B,H_kv,S,d] with H a multiple of H_kv → [B,S,H,d].

    sliding_window: a token sees itself and the window − 1 tokens before it. softcap: scores become c · tanh(s / c).
    dropout: the probability; its mask comes from ``module.score_dropout``, which parallelize puts there.

    Raises InputError for a mask, for attention that is not causal, and for any other keyword that is not understood.
    """
    _check_understood(more)
    if attention_mask is not None:
        raise InputError("attention: found attention_mask; allowed: causal attention and windows, without a mask")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InputError("attention: found is_causal=False; allowed: causal attention")
    length = query.shape[-2]
    windowed = sliding_window is not None and sliding_window < length
    if softcap is None and not dropout:
        shared = query.shape[1] != key.shape[1]
        mask = _visible(length, sliding_window, query.device) if windowed else None
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not windowed, scale=scaling, enable_gqa=shared
        )
    else:
        drop = cast(Callable[[torch.Tensor], torch.Tensor], module.score_dropout) if dropout else None
        visible = _visible(length, sliding_window if windowed else None, query.device)
        mixed = _eager_attention(query, key, value, visible, scaling or query.shape[-1] ** -0.5, softcap, drop)
    return mixed.transpose(1, 2), None


def _check_understood(keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        if value is None or name in UNREAD or (name in OFF and value is False):
            continue
        raise InputError(f"attention: found {name}; allowed: causal attention and windows, soft caps and dropout")


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[S,S] booleans: whether the token of the row sees that of the column."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return seen if window is None else seen.triu_(1 - window)


def _eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None,
    drop: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """The same by its definition, softmax in at least fp32."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    # Heads that share a key are rows of one product: [B,H_kv,(H/H_kv)·S,d].
    grouped = query.reshape(batch, groups, -1, width)
    scores = (grouped @ key.transpose(-1, -2)).view(batch, heads, length, length) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    if drop is not None:
        weights = drop(weights)
    return (weights.view(batch, groups, -1, length) @ value).view(batch, heads, length, width)


def register() -> str:
    """Makes ``causal_attention`` known to Hugging Face; returns the name to give a config."""
    AttentionInterface.register(NAME, causal_attention)
    return NAME
