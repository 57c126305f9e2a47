"""Model families: one rule table each, from a config to sites. A new family is one file beside llama.py."""

from shardwright.models.build import build_meta, of_blocks
from shardwright.models.config import load_config
from shardwright.models.families import family_of, has_rule
from shardwright.models.family import Family

__all__ = ["Family", "build_meta", "family_of", "has_rule", "load_config", "of_blocks"]
