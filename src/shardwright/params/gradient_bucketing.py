"""GradientBucketing: the small gradients of all parameter groups travel together, in buckets (runtime/bucket.py); only
while backward runs.

| when                      | what                                                                                     |
|---------------------------|------------------------------------------------------------------------------------------|
| backward begins           | the buckets are told what may come, so that none is larger                               |
| a small gradient is ready | it is copied into the bucket of the axes that split its storage; else of all its axes    |
| a bin of it has travelled | sums land; parts that are partial over other axes too go on, together, in a bin of those |
| backward ends             | the buckets are flushed                                                                  |

What is small is decided by the rank that uses most of a parameter, so that all ranks decide alike where a tensor axis
cuts it unevenly: else they would make their other collectives at different points, and wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright import trace
from shardwright.comm.groups import AxisGroup
from shardwright.params.shard import Shard
from shardwright.runtime.bucket import KINDS, GradientBucket, Kind, Load


class GradientBucketing:
    """The buckets of one schedule, and the gradients that are in them."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Kind, AxisGroup, int], GradientBucket] = {}
        self._stand_ins: dict[Shard, torch.Tensor | None] = {}

    def expect(self, members: Sequence[Shard]) -> None:
        """A backward begins that may bring gradients of ``members``."""
        for stored in members:
            like = self._stand_in(stored)
            if like is not None:
                self._first(stored).expect(like, _total(stored, like))
                if _goes_on(stored):
                    self._rest(stored).expect(stored.local)

    def load(self, stored: Shard) -> Load | None:
        """What a gradient fills of the bins that it is copied into; None where it travels by itself."""
        like = self._stand_in(stored)
        if like is None:
            return None
        return self._first(stored).load(like, _total(stored, like))

    def take(self, stored: Shard, gradient: torch.Tensor) -> bool:
        """Takes a copy of a small gradient; False where it is to travel by itself."""
        if self._stand_in(stored) is None:
            return False
        if stored.gather_group.size > 1:
            part = stored.new_gradient(gradient).zero_()
        else:
            gradient = part = stored.widened(gradient)
        self._first(stored).add(gradient, part, lambda: self._arrived(stored, part))
        if _goes_on(stored):
            self._rest(stored).send()
        return True

    def _arrived(self, stored: Shard, part: torch.Tensor) -> None:
        """``part`` is the sum over the first axes; it lands, or goes on over the others."""
        total = stored.widened(part)
        if _goes_on(stored):
            self._rest(stored).add(total, total, lambda: stored.land(total))
        else:
            stored.land(total)

    def advance(self) -> None:
        """Lets what travels take in what is next to arrive."""
        for bucket in self._all():
            bucket.advance()

    def finish(self) -> None:
        """Backward is over: every sum is made, and has landed. No memory is held."""
        for kind in KINDS:  # what is scattered may go on
            for bucket in self._all():
                if bucket.kind == kind:
                    bucket.flush()

    def abandon(self) -> None:
        """Drops what an aborted backward left."""
        for bucket in self._all():
            bucket.abandon()

    def _all(self) -> list[GradientBucket]:
        return list(self._buckets.values())

    def _stand_in(self, stored: Shard) -> torch.Tensor | None:
        """Like its gradients on this rank, without their memory; None where they travel by themselves."""
        if stored not in self._stand_ins:
            self._stand_ins[stored] = _like(stored, stored.whole_shape) if self._shares(stored) else None
        return self._stand_ins[stored]

    def _shares(self, stored: Shard) -> bool:
        """Whether its gradients are small, wherever they are formed."""
        if not stored.sharding.bucket or max(stored.gather_group.size, stored.rest_group.size) == 1:
            return False
        like = _like(stored, stored.most_shape)
        return self._first(stored).takes(like, _total(stored, like))

    def _first(self, stored: Shard) -> GradientBucket:
        """Where its gradients go first."""
        if stored.gather_group.size > 1:
            return self._bucket("reduce_scatter", stored.gather_group, stored)
        return self._bucket("all_reduce", stored.rest_group, stored)

    def _rest(self, stored: Shard) -> GradientBucket:
        """Where parts go on: what a full bin becomes, an Nth of it in its own element type, has room in a bin."""
        like = _like(stored, stored.whole_shape)
        travels = self._first(stored).travels_as(like, _total(stored, like))
        each = stored.gather_group.size * travels.itemsize
        return self._bucket("all_reduce", stored.rest_group, stored, stored.parameter.dtype.itemsize, each)

    def _bucket(self, kind: Kind, group: AxisGroup, stored: Shard, times: int = 1, part: int = 1) -> GradientBucket:
        cap = stored.sharding.bucket * times // part
        key = (kind, group, cap)
        if key not in self._buckets:
            self._buckets[key] = GradientBucket.over(stored.runtime, group, cap, kind)
        return self._buckets[key]


def _total(stored: Shard, gradient: torch.Tensor) -> torch.Tensor:
    """A tensor of the element type in which ``gradient`` is summed."""
    return stored.local if stored.wide(gradient) else gradient


def _goes_on(stored: Shard) -> bool:
    """Whether gradients are partial over axes that do not split storage, beside those that do."""
    return stored.gather_group.size > 1 and stored.rest_group.size > 1


def _like(stored: Shard, shape: Sequence[int]) -> torch.Tensor:
    """A gradient's shape and element type, without its memory."""
    with trace.quiet():
        return torch.empty((), dtype=stored.dtype, device=stored.local.device).expand(shape)
