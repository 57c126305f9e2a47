"""Gradients that backwards without synchronisation have added up: whole, this rank's alone, not reduced yet.

Such a gradient is the parameter's ``.grad`` until a backward reduces it: a DTensor whose placements are partial. So
whoever clears gradients clears it, and an optimizer or a norm that would take it for a sum sees that it is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.values.placement import local_of

_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class AccumulatedGradient(DTensor):
    """As a DTensor of partial sums, but it can be set to zero in place, alone or in a list of gradients."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ZEROING:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for tensor in tensors:
                local_of(tensor).zero_()
            return args[0] if func is _ZEROING[0] else None
        return DTensor.__torch_dispatch__(func, types, args, kwargs or {})


def accumulated_gradient(whole: torch.Tensor, parameter: DTensor, partial_axes: Sequence[str]) -> AccumulatedGradient:
    """``whole``, what this rank uses of ``parameter``, as its gradient: partial over the mesh axes of those names."""
    spec = parameter._spec
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = tuple(
        Partial() if name in partial_axes else placement
        for name, placement in zip(names, parameter.placements, strict=True)
    )
    partial = DTensorSpec(parameter.device_mesh, placements, tensor_meta=spec.tensor_meta)
    return cast(AccumulatedGradient, cast(Any, AccumulatedGradient)(whole, partial, requires_grad=False))
