"""The families that have a rule table."""

from __future__ import annotations

from typing import Any

from shardwright._errors import InputError
from shardwright.models import gemma2, gpt2, llama, mistral, phi, qwen2, qwen3
from shardwright.models.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (gemma2, gpt2, llama, mistral, phi, qwen2, qwen3)
}


def has_rule(config: Any) -> bool:
    """Whether the model has a rule table."""
    return config.model_type in FAMILIES


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config; InputError names those that have a rule."""
    if config.model_type not in FAMILIES:
        raise InputError(
            f"model_type: found {config.model_type!r}; allowed: {', '.join(FAMILIES)} "
            "(another runs with its linears unsplit where the plan says fallback: true)"
        )
    family = FAMILIES[config.model_type]
    family.check(config)
    return family
