"""The sites of a pre-norm decoder with separate q, k, v and a gated MLP: what most families share.

| site            | kind   | linears                | K     | features that stay together       |
|-----------------|--------|------------------------|-------|-----------------------------------|
| embed_tokens    | row    | the embedding          | vocab | –                                 |
| self_attn.qkv   | column | q_proj, k_proj, v_proj | h     | a head (key/value heads sharable) |
| self_attn.o     | row    | o_proj                 | heads | a head                            |
| mlp.gate_up     | column | gate_proj, up_proj     | h     | –                                 |
| mlp.down        | row    | down_proj              | f     | –                                 |
| lm_head         | column | lm_head                | h     | –                                 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.spec.site import Linear, Site


def head_size(config: Any) -> int:
    """Features of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_sites(config: Any, tokens: int, attention: str, out: str, after: str) -> tuple[Site, Site]:
    """The site of q, k, v and that of the output product named ``out``, which leaves to ``after``."""
    h, head = config.hidden_size, head_size(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    qkv = Site(
        f"{attention}.qkv",
        "column",
        tokens,
        h,
        (
            Linear(f"{attention}.q_proj", heads * head, head),
            Linear(f"{attention}.k_proj", kv_heads * head, head, sharable=True),
            Linear(f"{attention}.v_proj", kv_heads * head, head, sharable=True),
        ),
        after=(f"{attention}.o",),
    )
    return qkv, row(f"{attention}.o", f"{attention}.{out}", tokens, heads * head, h, after, k_unit=head)


def column(name: str, linears: tuple[str, ...], tokens: int, k: int, n: int, after: str) -> Site:
    """A column site of linears with n output features each."""
    return Site(name, "column", tokens, k, tuple(Linear(linear, n) for linear in linears), after=(after,))


def row(name: str, linear: str, tokens: int, k: int, n: int, after: str, k_unit: int = 1) -> Site:
    """A row site that leaves to ``after`` through the residual stream."""
    return Site(name, "row", tokens, k, (Linear(linear, n),), k_unit=k_unit, after=(after,), hidden=True)


BlockSites = Callable[[Any, int, str, str], Sequence[Site]]
"""(config, tokens, name of a block, the site behind it) → the block's sites."""


def gated_block(config: Any, tokens: int, block: str, following: str) -> Sequence[Site]:
    """Attention, then a gated MLP behind it."""
    h, f, mlp = config.hidden_size, config.intermediate_size, f"{block}.mlp"
    return [
        *attention_sites(config, tokens, f"{block}.self_attn", "o_proj", f"{mlp}.gate_up"),
        column(f"{mlp}.gate_up", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), tokens, h, f, f"{mlp}.down"),
        row(f"{mlp}.down", f"{mlp}.down_proj", tokens, f, h, following),
    ]


def sites(config: Any, tokens: int, block_sites: BlockSites = gated_block) -> tuple[Site, ...]:
    """The sites for M = ``tokens``, in the order of the forward pass: embedding, blocks, head."""
    h, vocab = config.hidden_size, config.vocab_size
    blocks = [f"model.layers.{index}" for index in range(config.num_hidden_layers)]
    entries = [*(f"{block}.self_attn.qkv" for block in blocks), "lm_head"]
    found = [row("model.embed_tokens", "model.embed_tokens", tokens, vocab, h, entries[0])]
    for block, following in zip(blocks, entries[1:], strict=True):
        found += block_sites(config, tokens, block, following)
    found.append(Site("lm_head", "column", tokens, h, (Linear("lm_head", vocab),)))
    return tuple(found)
