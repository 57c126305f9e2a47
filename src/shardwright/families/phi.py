"""Phi (1, 1.5, 2): attention and MLP side by side behind one LayerNorm, biases everywhere, partial rotary positions.

| site          | kind   | linears                | K     |
|---------------|--------|------------------------|-------|
| self_attn.qkv | column | q_proj, k_proj, v_proj | h     |
| self_attn.o   | row    | dense                  | heads |
| mlp.up        | column | fc1                    | h     |
| mlp.down      | row    | fc2                    | f     |
"""

from collections.abc import Sequence
from typing import Any

from shardwright.families import decoder
from shardwright.families.decoder import attention_sites, column, row
from shardwright.families.family import Family, refuse
from shardwright.spec.site import Site


def _block(config: Any, tokens: int, block: str, following: str) -> Sequence[Site]:
    """Attention and MLP read the same norm, and both lead to the next block."""
    h, f, mlp = config.hidden_size, config.intermediate_size, f"{block}.mlp"
    return [
        *attention_sites(config, tokens, f"{block}.self_attn", "dense", following),
        column(f"{mlp}.up", (f"{mlp}.fc1",), tokens, h, f, f"{mlp}.down"),
        row(f"{mlp}.down", f"{mlp}.fc2", tokens, f, h, following),
    ]


def sites(config: Any, tokens: int) -> tuple[Site, ...]:
    """The sites for M = ``tokens``, in the order of the forward pass."""
    return decoder.sites(config, tokens, _block)


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
