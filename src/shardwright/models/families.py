"""The families that have a rule table."""

from __future__ import annotations

from typing import Any

from shardwright._errors import InputError
from shardwright.models import llama
from shardwright.models.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (llama.FAMILY,)}


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config; InputError names those that have a rule."""
    if config.model_type not in FAMILIES:
        raise InputError(f"model_type: found {config.model_type!r}; allowed: {', '.join(FAMILIES)}")
    family = FAMILIES[config.model_type]
    family.check(config)
    return family
