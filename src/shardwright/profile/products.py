"""What one device computes while all others are at work too: products by shape, its memory, and the least operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.profile.stopwatch import Stopwatch
from shardwright.spec.cluster import Product

ELEMENTS = {"cpu": 2**21, "cuda": 2**28}
"""Elements of the large tensors, by kind of device: more than a rank's share of the caches, but on processors not so
many that each result would be fresh pages of the system, which activations are not.
"""


def shapes(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int, int]]:
    """(m, n, k) of all sizes, of at most ``limit`` multiplications."""
    return ((m, n, k) for m, n, k in product(sizes, repeat=3) if m * n * k <= limit)


def multiplication(m: int, n: int, k: int, dtype: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """Forms Y[m,n] = X[m,k] · W[n,k]ᵀ, in memory of its own each time, as a layer does."""
    x, w = (torch.randn(rows, k, device=device).to(getattr(torch, dtype)) for rows in (m, n))
    return lambda: nn.functional.linear(x, w)


def measure(shape: tuple[int, int, int], dtype: str, watch: Stopwatch) -> Product:
    """The rate of one product."""
    m, n, k = shape
    seconds = watch.seconds(multiplication(m, n, k, dtype, watch.device))
    return Product(dtype=dtype, m=m, n=n, k=k, flops=2 * m * n * k / seconds)


def memory_bandwidth(watch: Stopwatch) -> float:
    """Bytes per second that a + b reads and writes, into memory of its own each time, as a layer does."""
    a, b = (torch.ones(ELEMENTS[watch.device.type], device=watch.device) for _ in range(2))
    return 3 * a.nbytes / watch.seconds(lambda: a + b)


class _Counter(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def overhead(watch: Stopwatch) -> float:
    """Seconds of one operator on next to nothing: the mean of a small MLP's forward and backward, autograd included."""
    width = 4
    mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)).to(watch.device)
    x = torch.ones(2, width, device=watch.device, requires_grad=True)

    def step() -> None:
        mlp(x).sum().backward()

    step()
    with _Counter() as counter:
        step()
    return watch.seconds(step) / int(counter.count)
