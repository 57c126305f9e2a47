"""Whether a tensor was written to, by its bits: DTensors do not note all writes to what they hold.

A write through ``.data``, or by a foreach operator of an optimizer, changes no version that autograd keeps. So values
are looked at, a MiB at a time, without a copy. Nobody writes to a rehearsal's tensors.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwright import trace

COMPARED_BYTES = 2**20
"""How much is compared at a time."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of one size differ, ``other`` in the element type of ``one``: a bool [], on the device."""
    with trace.quiet(), torch.no_grad(), torch.inference_mode(False):
        different = torch.zeros((), dtype=torch.bool, device=one.device)
        if isinstance(one, FakeTensor):
            return different
        step = max(1, COMPARED_BYTES // other.dtype.itemsize)
        for a, b in zip(one.reshape(-1).split(step), other.reshape(-1).split(step), strict=True):
            different |= (_bits(a) != _bits(b.to(one.dtype))).any()
        return different


def fingerprint(tensor: torch.Tensor) -> int:
    """A sum over the bits, of a tensor on a CPU; 0 on other devices, where to read it would hold the host up."""
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor) or tensor.dtype.itemsize not in _INTEGERS:
        return 0
    with trace.quiet(), torch.no_grad():
        return int(_bits(tensor).sum(dtype=torch.int64))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, so that NaN equals itself; 16-byte numbers are left as they are."""
    integer = _INTEGERS.get(values.dtype.itemsize)
    return values if integer is None else values.view(integer)
