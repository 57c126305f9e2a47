"""Mistral: Llama with a sliding window, which the config gives to attention."""

from shardwright.models import decoder
from shardwright.models.family import Family

FAMILY = Family(model_type="mistral", sites=decoder.sites)
