"""Random values by global index: a seed gives the same tensor for every layout.

Each element is a pure function of (key, its index in the row-major whole tensor), so a rank computes its shard alone
and shards reassemble to the whole. The function is SplitMix64 (Steele, Lea and Flood 2014): the index walks along a
sequence whose start and odd step come from the key, and a finaliser of two multiplications mixes it. Values are
computed in float64 and rounded once, in chunks, so that little stands beside the shard. Equal bits on every rank ask
for one kind of device; two kinds may differ in the last bit of a float64 before rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from shardwright.values.placement import Cut, Ranges

CHUNK = 2**20
"""Elements computed at once; each holds about 32 bytes while it is computed."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # Stafford's thirteenth variant of the finaliser


def key_of(seed: int, name: str) -> int:
    """The 64-bit key of one tensor: ``name`` tells it from the others that are drawn from ``seed``."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def fold(key: int, count: int) -> int:
    """The key of the ``count``-th tensor that one key stands for."""
    return _mixed(key + (count + 1) * _GOLDEN)


def hashed(index: torch.Tensor, key: int) -> torch.Tensor:
    """64 mixed bits for each index, as int64 of either sign. Overwrites ``index`` (int64) and returns it."""
    # Products and sums wrap around. A step of its own keeps the sequences of two keys from being shifts of each other.
    z = index.mul_(_signed(_step(key))).add_(_signed(key))
    z ^= _shifted(z, 30)
    z.mul_(_signed(_FIRST))
    z ^= _shifted(z, 27)
    z.mul_(_signed(_SECOND))
    z ^= _shifted(z, 31)
    return z


def uniform(
    cut: Cut, key: int, dtype: torch.dtype, device: torch.device, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """The shard of a tensor that is uniform on (low, high); rounding to ``dtype`` may reach either end."""
    return _filled(cut, key, dtype, device, lambda u: u.mul_(high - low).add_(low))


def normal(
    cut: Cut, key: int, dtype: torch.dtype, device: torch.device, mean: float = 0.0, std: float = 1.0
) -> torch.Tensor:
    """The shard of a normal tensor. One hash an element: the inverse of the distribution function, up to 8.2 std."""
    return _filled(cut, key, dtype, device, lambda u: u.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2) * std).add_(mean))


def trunc_normal(
    cut: Cut,
    key: int,
    dtype: torch.dtype,
    device: torch.device,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
) -> torch.Tensor:
    """The shard of a normal tensor whose values outside [a, b] were drawn again, as torch's ``trunc_normal_`` does."""
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))

    def law(u: torch.Tensor) -> torch.Tensor:
        # The clamp catches bounds so far out that the error function has rounded to one.
        return u.mul_(high - low).add_(low).erfinv_().mul_(math.sqrt(2) * std).add_(mean).clamp_(a, b)

    return _filled(cut, key, dtype, device, law)


def _filled(
    cut: Cut, key: int, dtype: torch.dtype, device: torch.device, law: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The shard whose elements are ``law`` of float64 numbers in the open interval (0, 1)."""
    shard = torch.empty(cut.local_shape, dtype=dtype, device=device)
    flat = shard.view(-1)
    dims = _merged(cut)
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        flat[start:stop] = law(_units(hashed(_indices(dims, start, stop, device), key)))
    return shard


def _units(bits: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1) from the upper 52 bits and a half: exact, never 0 or 1, and symmetric about 1/2."""
    return _shifted(bits, 12).double().mul_(2.0**-52).add_(2.0**-53)


def _merged(cut: Cut) -> list[tuple[int, Ranges]]:
    """(size, pieces) of the dimensions, innermost first; a whole one is merged with its outer neighbour."""
    dims: list[tuple[int, Ranges]] = []
    inner = 1
    for size, pieces in zip(reversed(cut.shape), reversed(cut.ranges), strict=True):
        size, pieces = size * inner, tuple((start * inner, stop * inner) for start, stop in pieces)
        if pieces == ((0, size),):
            inner = size
        else:
            dims.append((size, pieces))
            inner = 1
    return [*dims, (inner, ((0, inner),))] if inner != 1 or not dims else dims


def _indices(dims: list[tuple[int, Ranges]], start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Where the shard's row-major elements [start, stop) lie in the whole: int64 [stop − start]."""
    rest = torch.arange(start, stop, dtype=torch.int64, device=device)
    index = torch.zeros_like(rest)
    stride = 1
    for depth, (size, pieces) in enumerate(dims):
        length = sum(high - low for low, high in pieces)
        place = rest
        if depth + 1 < len(dims):
            place = rest.remainder(length)
            rest = rest.floor_divide_(length)
        index += _in_whole(place, pieces).mul_(stride)
        stride *= size
    return index


def _in_whole(place: torch.Tensor, pieces: Ranges) -> torch.Tensor:
    """Positions along one dimension of the shard → positions along that of the whole."""
    shift, end = pieces[0][0], pieces[0][1] - pieces[0][0]
    whole = place + shift
    for low, high in pieces[1:]:  # what lies behind the end of a piece moves on to the next
        whole.add_((place >= end).to(place.dtype), alpha=low - end - shift)
        shift, end = low - end, end + high - low
    return whole


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right: torch's own copies the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - 2**64 if value >> 63 else value


def _mixed(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _step(key: int) -> int:
    """An odd step for the sequence of ``key``, with enough changes between its bits to mix well (2014, fig. 16)."""
    step = _mixed(key + _GOLDEN) | 1
    return step ^ 0xAAAAAAAAAAAAAAAA if (step ^ (step >> 1)).bit_count() < 24 else step
