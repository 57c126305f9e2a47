"""Buffers of a model that was built without memory: by the model's own rule or from files, whole on every rank."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwright import trace
from shardwright.checkpoint.pretrained import Place, SavedWeights
from shardwright.errors import InputError
from shardwright.values.initial import InDtype, Source, Unfilled


def fill_buffers(model: Any, device: torch.device, seed: int, source: Source) -> None:
    """Gives every buffer on the meta device its values: those of ``source`` where it reads files and has them, else
    what the model's own rule (Hugging Face's ``_init_weights``) says, drawn from ``seed`` where it draws.

    The rule runs on copies whose parameters have no memory, so no parameter is written. Raises InputError for a buffer
    that nothing fills, unless its values will come from a checkpoint.
    """
    origin = source.source if isinstance(source, InDtype) else source
    names = {module: name for name, module in model.named_modules()}
    wanted = [
        (module, name)
        for module in names
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    with trace.quiet():
        filled = _by_rule(model, wanted, seed)
        if isinstance(origin, SavedWeights):
            filled |= origin.buffers()
    for module, name in wanted:
        buffer: Any = module._buffers[name]
        lasting = name not in module._non_persistent_buffers_set
        if (module, name) not in filled and not (lasting and isinstance(origin, Unfilled)):
            qualified = f"{names[module]}.{name}".removeprefix(".")
            raise InputError(f"{qualified}: found no rule that fills it; allowed: buffers that the model or files fill")
        held = module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        trace.note(held, "buffer")
    with trace.quiet(), torch.no_grad():
        for (module, name), values in filled.items():
            buffer = module._buffers[name]
            buffer.copy_(values)


def _by_rule(model: Any, wanted: Sequence[Place], seed: int) -> dict[Place, torch.Tensor]:
    """Those of the wanted buffers that the model's rule fills, and their values."""
    if not wanted:
        return {}
    twins: dict[nn.Module, nn.Module] = {}
    _twin(model, twins)
    before = {place: twins[place[0]]._buffers[place[1]] for place in wanted}
    versions = {place: _version(buffer) for place, buffer in before.items()}
    holders = {module for module, _ in wanted}
    digest = hashlib.sha256(f"{seed}:buffers".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        for module, twin in twins.items():  # inner modules come before those that hold them
            if not holders.isdisjoint(module.modules()):
                model._init_weights(twin)
    found: dict[Place, torch.Tensor] = {}
    for place in wanted:
        now = twins[place[0]]._buffers[place[1]]
        if now is not None and (now is not before[place] or _version(now) != versions[place]):
            found[place] = now
    return found


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module and those inside it: parameters without memory, buffers with memory of their own."""
    if module in twins:
        return twins[module]
    twin = copy.copy(module)
    twin._modules = {name: None if child is None else _twin(child, twins) for name, child in module._modules.items()}
    twin._parameters = {
        name: None if value is None else nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"), False)
        for name, value in module._parameters.items()
    }
    twin._buffers = {
        name: torch.empty(buffer.shape, dtype=buffer.dtype) if buffer is not None and buffer.is_meta else buffer
        for name, buffer in module._buffers.items()
    }
    twins[module] = twin
    return twin
