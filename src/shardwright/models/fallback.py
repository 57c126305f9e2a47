"""A model without a rule table: its linears stay whole, its parameters plain; only data parallelism is done.

Each parameter's gradient is summed over the data axes by a hook, once per backward. Every rank holds the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright import trace
from shardwright.comm import AxisGroup, all_reduce
from shardwright.params.initial import Source
from shardwright.params.placement import Cut


def fill(model: Any, source: Source, device: torch.device) -> None:
    """Gives every parameter of ``model`` its values, whole, and every buffer its memory (computed by the model)."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                cut = Cut(tuple(parameter.shape), tuple(((0, length),) for length in parameter.shape))
                local = source(module, name, cut)
                trace.note(local, "parameter")
                made[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]  # a tied parameter stays one
        meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in meta.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            trace.note(module._buffers[name], "buffer")
        if meta:
            model._init_weights(module)


def reduce_gradients(model: nn.Module, group: AxisGroup) -> None:
    """From now on each parameter's fresh gradient is summed over ``group`` before it lands in ``.grad``."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and group.size > 1:
            parameter.register_hook(_Sum(group, name))


class _Sum:
    def __init__(self, group: AxisGroup, name: str):
        self.group, self.name = group, name

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        if total is gradient:
            total = gradient.clone()  # the engine's tensor may have other readers
        all_reduce(total, self.group, self.name)
        return total
