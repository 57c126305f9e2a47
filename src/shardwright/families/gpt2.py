"""GPT-2: q, k, v in one weight, weights stored as [K,N], learned positions, LayerNorms, tied embeddings.

| site      | kind   | linears             | K    | features that stay together          |
|-----------|--------|---------------------|------|--------------------------------------|
| wte       | row    | the embedding       | vocab| –                                    |
| attn.qkv  | column | c_attn (3 groups)   | h    | a head, in each of the three groups  |
| attn.o    | row    | c_proj              | h    | a head                               |
| mlp.up    | column | c_fc                | h    | –                                    |
| mlp.down  | row    | c_proj              | f    | –                                    |
| lm_head   | column | lm_head             | h    | –                                    |
"""

from typing import Any

from shardwright.families.decoder import column, head_size, row
from shardwright.families.family import Family, refuse
from shardwright.spec.site import Linear, Site


def sites(config: Any, tokens: int) -> tuple[Site, ...]:
    """The sites for M = ``tokens``, in the order of the forward pass."""
    h, vocab, head = config.hidden_size, config.vocab_size, head_size(config)
    f = config.n_inner or 4 * h
    blocks = [f"transformer.h.{index}" for index in range(config.num_hidden_layers)]
    entries = [*(f"{block}.attn.qkv" for block in blocks), "lm_head"]
    found = [row("transformer.wte", "transformer.wte", tokens, vocab, h, entries[0])]
    for block, following in zip(blocks, entries[1:], strict=True):
        attention, mlp = f"{block}.attn", f"{block}.mlp"
        fused = Linear(f"{attention}.c_attn", 3 * h, head, groups=3)
        found.append(Site(f"{attention}.qkv", "column", tokens, h, (fused,), after=(f"{attention}.o",)))
        found.append(row(f"{attention}.o", f"{attention}.c_proj", tokens, h, h, f"{mlp}.up", k_unit=head))
        found.append(column(f"{mlp}.up", (f"{mlp}.c_fc",), tokens, h, f, f"{mlp}.down"))
        found.append(row(f"{mlp}.down", f"{mlp}.c_proj", tokens, f, h, following))
    found.append(Site("lm_head", "column", tokens, h, (Linear("lm_head", vocab),)))
    return tuple(found)


def check(config: Any) -> None:
    """A decoder alone, with attention in the ordinary order."""
    refuse(config, "add_cross_attention", False)
    refuse(config, "reorder_and_upcast_attn", False)


FAMILY = Family(
    model_type="gpt2",
    sites=sites,
    embedding="transformer.wte",
    positions="transformer.wpe",
    blocks="transformer.h",
    attention="attn",
    parents=("attn", "mlp"),
    block_norms=("ln_1", "ln_2"),
    final_norm="transformer.ln_f",
    dropouts=("transformer.drop",),
    block_dropouts=("attn.resid_dropout", "mlp.dropout"),
    head_counts=("split_size",),
    attention_dropout="attn_pdrop",
    check=check,
)
