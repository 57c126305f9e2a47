"""Llama: decoder.py's sites as they are."""

from shardwright.models import decoder
from shardwright.models.family import Family

FAMILY = Family(model_type="llama", sites=decoder.sites)
