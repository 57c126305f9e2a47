"""Llama: decoder.py's sites as they are."""

from shardwright.families import decoder
from shardwright.families.family import Family

FAMILY = Family(model_type="llama", sites=decoder.sites)
