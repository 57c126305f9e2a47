"""Parameters that a stored one has replaced: an optimizer that was made before holds them, and would train nothing.

Their ``.grad`` is an error, which an optimizer's ``step`` and ``zero_grad`` meet; their values can still be read.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.errors import InputError


class RetiredParameter(nn.Parameter):
    """A parameter whose module holds a sharded one in its place."""

    @property
    def grad(self) -> Any:
        """No gradient will ever come."""
        _refuse()

    @grad.setter
    def grad(self, gradient: Any) -> None:
        _refuse()


def retire(parameter: torch.Tensor) -> None:
    """From now on gradients of ``parameter`` are asked for in vain, and that is said."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = RetiredParameter


def _refuse() -> NoReturn:
    raise InputError(
        "optimizer: found a parameter that its module no longer holds, since it was sharded; allowed: an optimizer "
        "made afterwards, of the module's parameters as they are then"
    )
