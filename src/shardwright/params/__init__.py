"""The store of parameters: how a shard is cut, what a product leases, and how a gradient lands."""

from shardwright.params.shard import cut, local_slices, make_parameter
from shardwright.params.store import StoredParameter, Use

__all__ = ["StoredParameter", "Use", "cut", "local_slices", "make_parameter"]
