"""Qwen2 and 2.5: Llama with biases on q, k, v, and sliding windows in some layers where the config asks for them."""

from shardwright.families import decoder
from shardwright.families.family import Family

FAMILY = Family(model_type="qwen2", sites=decoder.sites)
