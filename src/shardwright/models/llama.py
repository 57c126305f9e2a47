"""Llama: the rule table.

| site            | kind   | linears                | K     | features that stay together |
|-----------------|--------|------------------------|-------|-----------------------------|
| embed_tokens    | row    | the embedding          | vocab | –                           |
| self_attn.qkv   | column | q_proj, k_proj, v_proj | h     | a head                      |
| self_attn.o     | row    | o_proj                 | heads | a head                      |
| mlp.gate_up     | column | gate_proj, up_proj     | h     | –                           |
| mlp.down        | row    | down_proj              | f     | –                           |
| lm_head         | column | lm_head                | h     | –                           |
"""

from __future__ import annotations

from typing import Any

from shardwright._errors import InputError
from shardwright.models.family import Family
from shardwright.site import Linear, Site


def sites(config: Any, tokens: int) -> tuple[Site, ...]:
    """The sites of a LlamaConfig for M = ``tokens``, in the order of the forward pass."""
    h, f = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    blocks = [f"model.layers.{index}" for index in range(config.num_hidden_layers)]
    first = [f"{block}.self_attn.qkv" for block in blocks] + ["lm_head"]
    found = [
        Site(
            "model.embed_tokens", "row", tokens, config.vocab_size, (Linear("model.embed_tokens", h),),
            after=(first[0],), hidden=True,
        )
    ]  # fmt: skip
    for block, following in zip(blocks, first[1:], strict=True):
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        found += [
            Site(
                f"{attention}.qkv", "column", tokens, h,
                (
                    Linear(f"{attention}.q_proj", heads * head, head),
                    Linear(f"{attention}.k_proj", kv_heads * head, head),
                    Linear(f"{attention}.v_proj", kv_heads * head, head),
                ),
                after=(f"{attention}.o",),
            ),
            Site(
                f"{attention}.o", "row", tokens, heads * head, (Linear(f"{attention}.o_proj", h),),
                k_unit=head, after=(f"{mlp}.gate_up",), hidden=True,
            ),
            Site(
                f"{mlp}.gate_up", "column", tokens, h,
                (Linear(f"{mlp}.gate_proj", f), Linear(f"{mlp}.up_proj", f)),
                after=(f"{mlp}.down",),
            ),
            Site(
                f"{mlp}.down", "row", tokens, f, (Linear(f"{mlp}.down_proj", h),),
                after=(following,), hidden=True,
            ),
        ]  # fmt: skip
    found.append(Site("lm_head", "column", tokens, h, (Linear("lm_head", config.vocab_size),)))
    return tuple(found)


def check(config: Any) -> None:
    """Attention dropout waits for counter-based random values; everything else of a LlamaConfig is done."""
    if config.attention_dropout:
        raise InputError(f"attention_dropout: found {config.attention_dropout}; allowed: 0.0 in this version")


FAMILY = Family(
    model_type="llama",
    embedding="model.embed_tokens",
    blocks="model.layers",
    attention="self_attn",
    parents=("self_attn", "mlp"),
    block_norms=("input_layernorm", "post_attention_layernorm"),
    final_norm="model.norm",
    head="lm_head",
    sites=sites,
    check=check,
)
