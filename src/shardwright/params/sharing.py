"""Sharing: the small gradients of all units travel together, in buckets (comm/bucket.py); only while backward runs.

| when                     | what                                                                                    |
|--------------------------|-----------------------------------------------------------------------------------------|
| backward begins          | the buckets are told what may come, so that none is larger                              |
| a small gradient is ready | it is copied into the bucket of the axes that split its storage; else of all its axes  |
| backward ends            | the buckets are flushed; parts that are partial over other axes too share a bucket of   |
|                          | those; then everything lands, in the order in which it came                             |

What is small is decided by the rank that uses most of a parameter, so that all ranks decide alike where a tensor axis
cuts it unevenly: else they would make their other collectives at different points, and wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardwright import trace
from shardwright.comm.bucket import GradientBucket, Kind
from shardwright.comm.groups import AxisGroup

if TYPE_CHECKING:
    from shardwright.params.stored import StoredParameter


class Sharing:
    """The buckets of one schedule, and the gradients that are in them."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Kind, AxisGroup, int], GradientBucket] = {}
        self._taken: list[tuple[StoredParameter, torch.Tensor]] = []
        self._stand_ins: dict[StoredParameter, torch.Tensor | None] = {}

    def expect(self, members: Sequence[StoredParameter]) -> None:
        """A backward begins that may bring gradients of ``members``."""
        for stored in members:
            like = self._stand_in(stored)
            if like is not None:
                total = stored.local if stored.wide(like) else like
                self._first(stored).expect(like, total)
                if stored.gather_group.size > 1 and stored.rest_group.size > 1:
                    self._bucket("all_reduce", stored.rest_group, stored).expect(stored.local)

    def take(self, stored: StoredParameter, gradient: torch.Tensor) -> bool:
        """Takes a copy of a small gradient; False where it is to travel by itself."""
        if self._stand_in(stored) is None:
            return False
        if stored.gather_group.size > 1:
            result = stored.new_gradient(gradient).zero_()
        else:
            gradient = result = stored.widened(gradient)
        self._first(stored).add(gradient, result)
        self._taken.append((stored, result))
        return True

    def advance(self) -> None:
        """Lets what travels take in what is next to arrive."""
        for bucket in self._buckets.values():
            bucket.advance()

    def finish(self) -> None:
        """Backward is over: every sum is made, and lands. No memory is held."""
        taken, self._taken = self._taken, []
        self._flush("reduce_scatter")
        results = [(stored, stored.widened(result)) for stored, result in taken]
        for stored, result in results:
            if stored.gather_group.size > 1 and stored.rest_group.size > 1:
                self._bucket("all_reduce", stored.rest_group, stored).add(result, result)
        self._flush("all_reduce")
        for stored, result in results:
            stored.land(result)

    def abandon(self) -> None:
        """Drops what an aborted backward left."""
        self._taken = []
        for bucket in self._buckets.values():
            bucket.abandon()

    def _flush(self, kind: Kind) -> None:
        for (of_kind, _, _), bucket in self._buckets.items():
            if of_kind == kind:
                bucket.flush()

    def _stand_in(self, stored: StoredParameter) -> torch.Tensor | None:
        """Like its gradients on this rank, without their memory; None where they travel by themselves."""
        if stored not in self._stand_ins:
            self._stand_ins[stored] = _like(stored, stored.whole_shape) if self._shares(stored) else None
        return self._stand_ins[stored]

    def _shares(self, stored: StoredParameter) -> bool:
        """Whether its gradients are small, wherever they are formed."""
        if not stored.unit.sharding.bucket or max(stored.gather_group.size, stored.rest_group.size) == 1:
            return False
        like = _like(stored, stored.most_shape)
        return self._first(stored).takes(like, stored.local if stored.wide(like) else like)

    def _first(self, stored: StoredParameter) -> GradientBucket:
        """Where its gradients go first."""
        if stored.gather_group.size > 1:
            return self._bucket("reduce_scatter", stored.gather_group, stored)
        return self._bucket("all_reduce", stored.rest_group, stored)

    def _bucket(self, kind: Kind, group: AxisGroup, stored: StoredParameter) -> GradientBucket:
        key = (kind, group, stored.unit.sharding.bucket)
        if key not in self._buckets:
            self._buckets[key] = GradientBucket.over(stored.runtime, group, stored.unit.sharding.bucket, kind)
        return self._buckets[key]


def _like(stored: StoredParameter, shape: Sequence[int]) -> torch.Tensor:
    """A gradient's shape and element type, without its memory."""
    with trace.quiet():
        return torch.empty((), dtype=stored.dtype, device=stored.local.device).expand(shape)
