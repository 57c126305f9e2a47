"""Hooks on stored parameters: autograd never accumulates into one, so the store calls them when a gradient lands.

``register_hook`` sees the reduced gradient, a DTensor, and may replace it; ``register_post_accumulate_grad_hook`` sees
the parameter with its ``.grad``. Both are called once for each backward that reduces. Hooks that were registered before
the parameter was stored move with it.

What autograd does accumulate by itself comes from outside: a weight that was read without its module being called. Its
gradient would be this rank's alone, so a guard refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor


class _Guard:
    """Raises when autograd itself has brought a gradient to a parameter whose gradients the store reduces."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"{self.name}: found a gradient from a read outside of its module's call, which no rank reduces; allowed: "
            "calling the module, or reading the weight inside a module that is sharded as one group"
        )


def guard(parameter: torch.nn.Parameter, name: str) -> None:
    """Refuses gradients that do not come through the store, from now on; once for a parameter that trains."""
    any_parameter: Any = parameter
    if any(isinstance(hook, _Guard) for hook in (any_parameter._post_accumulate_grad_hooks or {}).values()):
        return
    parameter.register_post_accumulate_grad_hook(_Guard(name))


def move(old: Any, new: Any) -> None:
    """Hooks of ``old`` are those of ``new``; handles that remove them still do."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if getattr(old, "_post_accumulate_grad_hooks", None):
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def before(parameter: Any, gradient: DTensor) -> DTensor:
    """``gradient`` as the hooks on the parameter's gradient leave it."""
    for hook in _of(parameter._backward_hooks):
        changed = hook(gradient)
        if changed is not None:
            gradient = cast(DTensor, changed)
    return gradient


def after(parameter: Any) -> None:
    """Calls what waits for an accumulated gradient."""
    for hook in _of(parameter._post_accumulate_grad_hooks):
        if not isinstance(hook, _Guard):
            hook(parameter)


def _of(registered: dict[int, Callable[..., Any]] | None) -> list[Callable[..., Any]]:
    return list(registered.values()) if registered else []
