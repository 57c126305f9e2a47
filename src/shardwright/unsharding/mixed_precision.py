"""The element types of one call of ``shard``, as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MixedPrecision:
    """dtype: in which the module computes and gradients travel. reduce_dtype: in which gradients are added up.

    None stands for the parameters' own element type, which masters keep in any case.
    """

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def chosen_types(
    policy: MixedPrecision | None, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> MixedPrecision:
    """``policy``, or one of the two keywords. Raises InputError where both are given."""
    if policy is None:
        return MixedPrecision(dtype, reduce_dtype)
    if dtype is not None or reduce_dtype is not None:
        raise InputError("mixed_precision: found beside dtype or reduce_dtype; allowed: one of the two ways")
    return policy
