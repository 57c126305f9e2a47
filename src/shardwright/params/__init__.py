"""The store of parameters: how a shard is cut, what a product leases, and how a gradient lands."""

from shardwright.params.shard import Cut, cut, cut_of, make_parameter
from shardwright.params.store import StoredParameter, Use

__all__ = ["Cut", "StoredParameter", "Use", "cut", "cut_of", "make_parameter"]
