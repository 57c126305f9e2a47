"""The names by which a model's tensors go in files: those of its Hugging Face state dict, a tied weight's first."""

from __future__ import annotations

import torch
from torch import nn


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """State-dict name → parameter or persistent buffer, in the model's order; one that has several names has the first.

    Parameters are the model's own: DTensors where it is parallelized.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
