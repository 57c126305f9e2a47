"""What a rule table says about a model family: where its parts are, and which sites its config makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.errors import InputError
from shardwright.spec.site import Site


def nothing_to_check(config: Any) -> None:
    """The check of a family that does everything its config can ask for."""


@dataclass(frozen=True)
class Family:
    """One family of Hugging Face models.

    Module names are qualified from the root; those in a block are relative to it.
    embedding, positions, blocks, final_norm, head: where they are (positions: a table of learned ones, or none).
    attention: takes its hidden states as a carrier. parents: modules whose end clears the results that siblings cached.
    block_norms: norms of hidden states; head_norms: norms inside attention, whose rows are split by heads too.
    norm_from_one: RMSNorm weights count from one.
    dropouts: nn.Dropout modules on hidden states, from the root or (in a block) relative to it.
    head_counts: attributes of the attention module that count features or heads, to be divided by the ranks that
        split heads.
    sites: (config, M) → sites in the order of the forward pass, M the tokens of a micro-batch over the whole mesh.
    attention_dropout: the config's field, its name kept for errors and its value for the layer.
    check: raises InputError for a config that asks for something this version does not do, naming the field.
    """

    model_type: str
    sites: Callable[[Any, int], tuple[Site, ...]]
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    blocks: str = "model.layers"
    attention: str = "self_attn"
    parents: tuple[str, ...] = ("self_attn", "mlp")
    block_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, ...] = ()
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norm_from_one: bool = False
    dropouts: tuple[str, ...] = ()
    block_dropouts: tuple[str, ...] = ()
    head_counts: tuple[str, ...] = ()
    attention_dropout: str = "attention_dropout"
    check: Callable[[Any], None] = nothing_to_check

    def in_attention(self, site: Site) -> bool:
        """Whether the site is one of a block's attention."""
        return site.name.startswith(f"{self.blocks}.") and f".{self.attention}." in site.name


def refuse(config: Any, name: str, allowed: object) -> None:
    """Raises InputError unless the config's field has the allowed value (or is missing)."""
    found = getattr(config, name, allowed)
    if found != allowed:
        raise InputError(f"{config.model_type}: {name}: found {found!r}; allowed: {allowed!r} in this version")
