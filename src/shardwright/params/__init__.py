"""The store of parameters: how a shard is cut, what a product leases, and how a gradient lands."""

from shardwright.params.placement import Cut, cut, cut_of, make_parameter
from shardwright.params.reductions import Reductions
from shardwright.params.schedule import InFlightError, Schedule
from shardwright.params.store import ParameterStore
from shardwright.params.stored import StoredParameter
from shardwright.params.unit import ParameterGroup, Use

__all__ = [
    "Cut",
    "InFlightError",
    "ParameterGroup",
    "ParameterStore",
    "Reductions",
    "Schedule",
    "StoredParameter",
    "Use",
    "cut",
    "cut_of",
    "make_parameter",
]
