"""Mistral: Llama with a sliding window, which the config gives to attention."""

from shardwright.families import decoder
from shardwright.families.family import Family

FAMILY = Family(model_type="mistral", sites=decoder.sites)
