"""The gradient bucket: small gradients share a buffer that exists only between the first one and a flush.

    bucket = sw.GradientBucket(cap="25MiB", axes=mesh["data"], reduce_dtype=torch.float32)
    for gradient, destination in pairs:
        if bucket.takes(gradient, destination):
            bucket.add(gradient, destination)      # may send what was added before
    bucket.flush()                                 # every sum is in its destination; no memory is held

The buffer scales with the cap, not with the model: all that fills, travels and arrives is at most cap·(1 + 1/N) bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.groups import AxisGroup
from shardwright.errors import InputError
from shardwright.files.sizes import parse_bytes
from shardwright.runtime.bins import Bins
from shardwright.runtime.runtime import Runtime

Kind = Literal["reduce_scatter", "all_reduce"]
KINDS = ("reduce_scatter", "all_reduce")
SMALL = 4
"""A gradient is small if this many of its size are within the cap: a bin is half a cap, and holds at least two."""


@dataclass(frozen=True)
class Load:
    """What a gradient is to the ``bins`` it goes into: ``bytes`` of it, padded, of the ``room`` in a bin."""

    bins: Bins
    bytes: int
    room: int


class GradientBucket:
    """Sums small gradients over the ranks of ``axes``, many in one collective.

    cap: bytes, or a size such as ``"25MiB"``; 0 takes nothing. axes: a DeviceMesh; gradients are summed over all of
    its axes. kind: ``reduce_scatter``, where each rank receives its ⌈rows/N⌉ rows, or ``all_reduce``, where it receives
    all. reduce_dtype: element type in which sums are taken; None is each destination's.

    Buckets over equal ranks of one root mesh share memory: a flush of one is a flush of all. Every rank adds the same
    gradients in the same order. On gloo, gradients to be scattered travel in their own element type; otherwise in that
    of their sums.

    Raises InputError for a size or kind that is not allowed.
    """

    def __init__(
        self,
        cap: str | int = "25MiB",
        *,
        axes: DeviceMesh,
        kind: Kind = "reduce_scatter",
        reduce_dtype: torch.dtype | None = None,
    ):
        runtime = Runtime.of(axes)
        self._begin(runtime, runtime.group(axes.mesh_dim_names or ()), cap, kind, reduce_dtype)

    @classmethod
    def over(
        cls,
        runtime: Runtime,
        group: AxisGroup,
        cap: str | int,
        kind: Kind = "reduce_scatter",
        reduce_dtype: torch.dtype | None = None,
    ) -> GradientBucket:
        """The same, over a group that is at hand."""
        bucket = cls.__new__(cls)
        bucket._begin(runtime, group, cap, kind, reduce_dtype)
        return bucket

    def _begin(
        self, runtime: Runtime, group: AxisGroup, cap: str | int, kind: Kind, reduce_dtype: torch.dtype | None
    ) -> None:
        if kind not in KINDS:
            raise InputError(f"kind: found {kind!r}; allowed: {', '.join(KINDS)}")
        self.cap = parse_bytes(cap, "cap")
        self.kind, self.reduce_dtype, self.group = kind, reduce_dtype, group
        self._runtime = runtime
        self._used: dict[Bins, None] = {}

    @property
    def _travels_as_it_is(self) -> bool:
        return self.kind == "reduce_scatter" and self.group.backend != "nccl"

    def travels_as(self, gradient: torch.Tensor, destination: torch.Tensor | None = None) -> torch.dtype:
        """The element type in which ``gradient`` is in the bucket."""
        total = self.reduce_dtype or (gradient if destination is None else destination).dtype
        return gradient.dtype if self._travels_as_it_is else total

    def _bins(self, gradient: torch.Tensor, destination: torch.Tensor | None) -> Bins:
        return self._runtime.bucket(self.group, self.travels_as(gradient, destination), gradient.device)

    def padded_bytes(self, gradient: torch.Tensor, destination: torch.Tensor | None = None) -> int:
        """Bytes that ``gradient`` [rows, …] takes in the bucket: N·⌈rows/N⌉ rows, if it is scattered.

        Only its shape, element type and device are read; so are those of ``destination``, by default like it.
        """
        return self._bins(gradient, destination).padded_bytes(gradient.shape, self.kind)

    def load(self, gradient: torch.Tensor, destination: torch.Tensor | None = None) -> Load:
        """What a gradient like this one fills."""
        bins = self._bins(gradient, destination)
        return Load(bins, self.padded_bytes(gradient, destination), bins.room(self.cap, self.kind))

    def takes(self, gradient: torch.Tensor, destination: torch.Tensor | None = None) -> bool:
        """Whether ``gradient`` is small: at most a fourth of the cap, padded.

        Any other is to be reduced from its own storage, and so is a scalar where gradients are scattered.
        """
        if self.cap == 0 or (self.kind == "reduce_scatter" and not gradient.dim()):
            return False
        return SMALL * self.padded_bytes(gradient, destination) <= self.cap

    def expect(self, gradient: torch.Tensor, destination: torch.Tensor | None = None) -> None:
        """A gradient like this one will be added before the next flush.

        A bin is never larger than what is expected, and travels when all of that is there. If one is told, tell all.
        """
        self._bins(gradient, destination).expect(self.padded_bytes(gradient, destination))

    def add(self, gradient: torch.Tensor, destination: torch.Tensor, landed: Callable[[], None] | None = None) -> None:
        """Takes a copy of ``gradient``; its sum over ranks is added to ``destination``, when flushed at the latest.

        destination: contiguous, zero or an earlier sum: this rank's rows of the gradient (all, for kind all_reduce,
        where it may be the gradient itself, which becomes the sum). landed: called when the sum is there.

        Raises InputError where the gradient is not small or the destination does not fit it.
        """
        if not self.takes(gradient, destination):
            size = self.padded_bytes(gradient, destination)
            raise InputError(
                f"gradient: found {size} B, padded, in {gradient.dim()} dimensions; allowed: at most a fourth of the "
                f"cap of {self.cap} B, and rows where it is scattered"
            )
        bins = self._bins(gradient, destination)
        self._used[bins] = None
        total = self.reduce_dtype if self._travels_as_it_is else None
        bins.add(gradient, destination, self.cap, self.kind, total, landed)

    def advance(self) -> None:
        """Takes in what is next to arrive: call it between computations, so that what follows can travel."""
        for bins in self._used:
            bins.advance()

    def send(self) -> None:
        """What was added travels now, though it does not fill a bin."""
        for bins in self._used:
            bins.send()

    def flush(self) -> None:
        """Until every sum is in its destination. The bucket holds no memory then."""
        for bins in self._used:
            bins.flush()
        self._used = {}

    def abandon(self) -> None:
        """Drops what was added, after an error: destinations that had not landed are to be cleared.

        What travels already is let through, so every rank must abandon at the same point. Then the bucket is as new.
        """
        for bins in self._used:
            bins.abandon()
        self._used = {}
