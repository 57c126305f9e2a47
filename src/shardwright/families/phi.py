"""Phi (1, 1.5, 2): attention and MLP side by side behind one LayerNorm, biases everywhere, partial rotary positions.

| site          | kind   | linears                | K     |
|---------------|--------|------------------------|-------|
| self_attn.qkv | column | q_proj, k_proj, v_proj | h     |
| self_attn.o   | row    | dense                  | heads |
| mlp.up        | column | fc1                    | h     |
| mlp.down      | row    | fc2                    | f     |
"""

from typing import Any

from shardwright.families.decoder import attention_sites, column, row
from shardwright.families.family import Family, refuse
from shardwright.spec.site import Linear, Site


def sites(config: Any, tokens: int) -> tuple[Site, ...]:
    """The sites for M = ``tokens``, in the order of the forward pass."""
    h, f, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    blocks = [f"model.layers.{index}" for index in range(config.num_hidden_layers)]
    entries = [*(f"{block}.self_attn.qkv" for block in blocks), "lm_head"]
    found = [row("model.embed_tokens", "model.embed_tokens", tokens, vocab, h, entries[0])]
    for block, following in zip(blocks, entries[1:], strict=True):
        mlp = f"{block}.mlp"
        found += attention_sites(config, tokens, f"{block}.self_attn", "dense", following)
        found.append(column(f"{mlp}.up", (f"{mlp}.fc1",), tokens, h, f, f"{mlp}.down"))
        found.append(row(f"{mlp}.down", f"{mlp}.fc2", tokens, f, h, following))
    found.append(Site("lm_head", "column", tokens, h, (Linear("lm_head", vocab),)))
    return tuple(found)


def check(config: Any) -> None:
    """The norms of heads that some early configs ask for have never been published with weights."""
    refuse(config, "qk_layernorm", False)


FAMILY = Family(
    model_type="phi",
    sites=sites,
    block_norms=("input_layernorm",),
    final_norm="model.final_layernorm",
    dropouts=("model.embed_dropout",),
    block_dropouts=("resid_dropout",),
    check=check,
)
