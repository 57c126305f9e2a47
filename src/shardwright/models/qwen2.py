"""Qwen2 and 2.5: Llama with biases on q, k, v, and sliding windows in some layers where the config asks for them."""

from shardwright.models import decoder
from shardwright.models.family import Family

FAMILY = Family(model_type="qwen2", sites=decoder.sites)
