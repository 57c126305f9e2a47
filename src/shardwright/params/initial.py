"""Where a shard's first values come from: a live model, a seed, or (in a rehearsal) nowhere.

Each source is a function (module, parameter name, this rank's slices) → the shard, in storage of its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

Source = Callable[[nn.Module, str, tuple[slice, ...]], torch.Tensor]


def from_values(module: nn.Module, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
    """The part of what the module holds (equal on every rank)."""
    whole: torch.Tensor = getattr(module, name)
    return whole.detach()[slices].clone(memory_format=torch.contiguous_format)


def unfilled(device: torch.device) -> Source:
    """Memory without values, for a rehearsal."""

    def source(module: nn.Module, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        shape = [part.stop - part.start for part in slices]
        return torch.empty(shape, dtype=getattr(module, name).dtype, device=device)

    return source


def from_seed(
    initialise: Callable[[nn.Module], object], names: Mapping[nn.Module, str], seed: int, device: torch.device
) -> Source:
    """Values drawn by the model's own rule for the whole module, from a generator seeded by seed and module name.

    The whole is drawn on the CPU and cut, so every layout gets the same weights. initialise: fills a module's
    parameters in place (Hugging Face's ``_init_weights``). names: qualified module names.
    """

    def source(module: nn.Module, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        whole = copy.copy(module)
        whole._parameters = {
            key: None if value is None else nn.Parameter(torch.empty(value.shape, dtype=value.dtype))
            for key, value in module._parameters.items()
        }
        digest = hashlib.sha256(f"{seed}:{names[module]}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            initialise(whole)
        return from_values(whole, name, slices).to(device)

    return source
