"""What a rule table says about a model family: where its parts are, and which sites its config makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.site import Site


@dataclass(frozen=True)
class Family:
    """One family of Hugging Face models.

    Module names are qualified from the root; those in a block are relative to it. attention: takes its hidden states
    as a carrier. parents: modules whose end clears the results that siblings have cached. sites: (config, tokens of
    one data rank's micro-batch over the whole mesh) → sites in order. check: raises InputError for a config that asks
    for something this version does not do, naming the field.
    """

    model_type: str
    embedding: str
    blocks: str
    attention: str
    parents: tuple[str, ...]
    block_norms: tuple[str, ...]
    final_norm: str
    head: str
    sites: Callable[[Any, int], tuple[Site, ...]]
    check: Callable[[Any], None]
