"""Qwen3: Llama with a norm of each query and key head, whose weight all heads share.

The heads are split over the tensor axis, so the gradient of that weight is partial over it too.
"""

from shardwright.families import decoder
from shardwright.families.family import Family

FAMILY = Family(model_type="qwen3", sites=decoder.sites, head_norms=("self_attn.q_norm", "self_attn.k_norm"))
