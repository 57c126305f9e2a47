"""Token ids and labels are numbers of classes: those outside of the vocabulary are refused by name.

A rank that owns no such row would look it up as zeros, and a label that no rank owns as a logit of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright import trace
from shardwright.errors import InputError


def check_classes(field: str, numbers: torch.Tensor, classes: int, ignored: int | None = None) -> None:
    """Raises InputError where one of ``numbers`` (any shape) is neither in 0 … classes − 1 nor ``ignored``.

    On the CPU at once, naming ``field`` and the number. On another device the host does not wait for the answer: an
    assertion there fails with the same words, without the number. Fake tensors have no values. The operators of the
    check are no part of a step: no recorder sees them.
    """
    if isinstance(numbers, FakeTensor) or numbers.is_meta or torch.compiler.is_compiling():
        return
    with trace.quiet(), torch.no_grad():
        outside = (numbers < 0) | (numbers >= classes)
        if ignored is not None:
            outside &= numbers != ignored
        allowed = f"0 to {classes - 1}" + ("" if ignored is None else f", or {ignored} for a token without a target")
        if numbers.device.type != "cpu":
            torch._assert_async(~outside.any(), f"{field}: found a number outside the vocabulary; allowed: {allowed}")
        elif outside.any():
            raise InputError(f"{field}: found {int(numbers[outside][0])}; allowed: {allowed}")


def check_ids(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook of an embedding that is not ours: as ``check_classes`` of the ids that it is called with."""
    if isinstance(module, nn.Embedding) and args:
        check_classes("input_ids", args[0], module.num_embeddings)
