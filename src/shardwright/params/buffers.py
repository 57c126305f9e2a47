"""Buffers of a model that was built without memory: computed, not drawn, and whole on every rank."""

from __future__ import annotations

from typing import Any

import torch

from shardwright import trace


def fill_buffers(model: Any, device: torch.device) -> None:
    """Buffers are computed, not drawn: every rank holds them whole."""
    for module in model.modules():
        meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in meta.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            trace.note(module._buffers[name], "buffer")
        if meta:
            model._init_weights(module)
