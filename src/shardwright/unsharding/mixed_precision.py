"""The element types of one call of ``shard``, as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MixedPrecision:
    """dtype: in which the module computes and gradients travel. reduce_dtype: in which gradients are added up.

    None stands for the parameters' own element type, which masters keep in any case.
    """

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
