"""The families that have a rule table."""

from __future__ import annotations

from typing import Any

from shardwright.errors import InputError
from shardwright.families import gemma2, gpt2, llama, mistral, phi, qwen2, qwen3
from shardwright.families.family import Family, refuse

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (gemma2, gpt2, llama, mistral, phi, qwen2, qwen3)
}

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of attention that layers/attention.py does."""


def has_rule(config: Any) -> bool:
    """Whether the model has a rule table."""
    return config.model_type in FAMILIES


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config; InputError names those that have a rule."""
    if config.model_type not in FAMILIES:
        raise InputError(
            f"model_type: found {config.model_type!r}; allowed: {', '.join(FAMILIES)} "
            "(another runs with its linears unsplit under --fallback, or where the plan says fallback: true)"
        )
    family = FAMILIES[config.model_type]
    _check_attention(config)
    family.check(config)
    return family


def _check_attention(config: Any) -> None:
    """Raises InputError where attention is neither causal nor over a window before each token."""
    for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            raise InputError(f"layer_types.{number}: found {kind!r}; allowed: {', '.join(LAYER_TYPES)}")
    refuse(config, "is_causal", True)
    if getattr(config, "use_bidirectional_attention", None):
        refuse(config, "use_bidirectional_attention", False)
