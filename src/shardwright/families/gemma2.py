"""Gemma 2: norms before and after attention and MLP, soft-capped scores and logits, scaled and tied embeddings.

The soft cap of the logits is elementwise, so Hugging Face's code does it on this rank's part of the vocabulary.
"""

from shardwright.families import decoder
from shardwright.families.family import Family

FAMILY = Family(
    model_type="gemma2",
    sites=decoder.sites,
    block_norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    norm_from_one=True,
)
