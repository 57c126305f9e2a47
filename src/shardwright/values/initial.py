"""Where a shard's first values come from: a live model, a seed, or (in a rehearsal) nowhere.

Each source is a function (module, parameter name, cut) → the shard, in storage of its own.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import trace
from shardwright.errors import InputError
from shardwright.values.placement import Cut
from shardwright.values.random import key_of, normal, trunc_normal, uniform

Source = Callable[[nn.Module, str, Cut], torch.Tensor]
Draw = partial[torch.Tensor]
"""(cut, key, dtype, device) → the shard of a whole that is a function of the key; its keywords are the law's."""


def from_values(module: nn.Module, name: str, cut: Cut) -> torch.Tensor:
    """The part of what the module holds (equal on every rank)."""
    return cut.of(getattr(module, name))


@dataclass(frozen=True)
class InDtype:
    """What ``source`` gives, floating-point values cast to ``dtype``: exact to a wider type, else rounded once."""

    source: Source
    dtype: torch.dtype

    def __call__(self, module: nn.Module, name: str, cut: Cut) -> torch.Tensor:
        """This rank's shard of ``module.name``."""
        shard = self.source(module, name, cut)
        return shard.to(self.dtype) if shard.is_floating_point() else shard


def retype(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives the floating-point parameters of ``model`` that have no memory yet the element type ``dtype``."""
    with unset_fake_temporarily(), trace.quiet():
        for parameter in model.parameters():
            if parameter.is_meta and parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True)
class Unfilled:
    """The source of memory without values: a rehearsal has none, and a resumed run's come from its checkpoint."""

    device: torch.device

    def __call__(self, module: nn.Module, name: str, cut: Cut) -> torch.Tensor:
        """The memory of this rank's shard."""
        return torch.empty(cut.local_shape, dtype=getattr(module, name).dtype, device=self.device)


def from_seed(
    initialise: Callable[[nn.Module], object], names: Mapping[nn.Module, str], seed: int, device: torch.device
) -> Source:
    """Values drawn by the model's own rule, by global index and a key of seed and qualified parameter name.

    Every layout gets the same weights, and a rank makes no more than its shard. initialise: fills the parameters of a
    module, and of modules inside it, in place (Hugging Face's ``_init_weights``); it is run now, on copies without
    memory, from the innermost module outward, to hear what it does. names: qualified module names; of modules that
    share a parameter now, the first one's rule and name count for all.

    A parameter for which it does something that cannot be drawn by index is drawn whole on the CPU, with the others of
    its module, from a generator seeded by seed and module name; then cut. Such a source raises InputError for a
    parameter that ``initialise`` leaves without values.
    """
    with trace.quiet():  # no memory is made, and no step does it
        rehearsal = _Rehearsal(initialise, names)

    def source(module: nn.Module, name: str, cut: Cut) -> torch.Tensor:
        dtype = getattr(module, name).dtype
        module, name = rehearsal.first[module, name]
        prefix = names[module]
        rules = rehearsal.rules[module]
        qualified = f"{prefix}.{name}" if prefix else name
        # The module as one: a rule that we could not follow may have read the other parameters.
        if any(rule.draw is None for rule in rules.values()):
            whole = rehearsal.really(module, f"{seed}:{prefix}")[name]
            if _has_gaps(whole):
                raise InputError(f"{qualified}: found no rule that fills it; allowed: parameters that the model fills")
            return cut.of(whole).to(device)
        return rules[name].shard(cut, key_of(seed, qualified), dtype, device)

    return source


def _has_gaps(whole: torch.Tensor) -> bool:
    """Whether values are missing; fake tensors have none to look at."""
    if isinstance(whole, FakeTensor) or not whole.is_floating_point():
        return False
    with trace.quiet():
        return bool(whole.isnan().any())


class _Rule:
    """How one parameter gets its values, as far as heard: ``draw`` for the whole, then constants for some rows.

    draw is None where nothing was heard, or something that we cannot repeat.
    """

    def __init__(self, parameter: torch.Tensor):
        self.parameter = parameter
        self.draw: Draw | None = None
        self.rows: list[tuple[int, int, float]] = []

    def hear(self, written: torch.Tensor, draw: Draw | None) -> None:
        """``written``, a view of the parameter, was filled by ``draw`` (None: by something else)."""
        parameter = self.parameter
        if draw is not None and written.is_contiguous() and written.dtype == parameter.dtype:
            if written.numel() == parameter.numel():
                self.draw, self.rows = draw, []
                return
            width = math.prod(parameter.shape[1:])
            start, stop = written.storage_offset(), written.storage_offset() + written.numel()
            if draw.func is _constant and start % width == 0 and stop % width == 0:
                self.rows.append((start // width, stop // width, draw.keywords["value"]))
                return
        self.draw = None

    def shard(self, cut: Cut, key: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self.draw is not None
        shard = self.draw(cut, key, dtype, device)
        for start, stop, value in self.rows:
            place = 0
            for low, high in cut.ranges[0]:
                first, last = max(start, low), min(stop, high)
                if first < last:
                    shard[place + first - low : place + last - low].fill_(value)
                place += high - low
        return shard


class _Listener(TorchDispatchMode):
    """Notes what is written to the parameters in ``rules``, told apart by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[int, _Rule] = {}

    def rule_of(self, tensor: torch.Tensor) -> _Rule | None:
        return self.rules.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        given |= {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
                for tensor in _tensors(given[argument.name]):
                    rule = self.rule_of(tensor)
                    if rule is not None:
                        rule.hear(tensor, _draw_of(func, given))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _draw_of(func: Any, given: Mapping[str, Any]) -> Draw | None:
    """What an operator in place fills its tensor with, or None."""
    aten = torch.ops.aten
    if func is aten.normal_.default:
        return partial(normal, mean=given.get("mean", 0.0), std=given.get("std", 1.0))
    if func is aten.uniform_.default:
        return partial(uniform, low=given.get("from", 0.0), high=given.get("to", 1.0))
    if func is aten.zero_.default:
        return partial(_constant, value=0.0)
    if func is aten.fill_.Scalar:
        return partial(_constant, value=given["value"])
    return None


def _constant(cut: Cut, key: int, dtype: torch.dtype, device: torch.device, value: float) -> torch.Tensor:
    return torch.full(cut.local_shape, value, dtype=dtype, device=device)


class _Rehearsal:
    """The modules' copies without memory, and what ``initialise`` was heard to do to their parameters.

    The copies are fake CPU tensors, not meta ones: torch's rules skip their work on meta tensors. rules: module → its
    parameters' rules, by name. first: (module, name) → the first pair in ``names`` that is the same parameter.
    """

    def __init__(self, initialise: Callable[[nn.Module], object], names: Mapping[nn.Module, str]):
        self.initialise = initialise
        self.rules: dict[nn.Module, dict[str, _Rule]] = {}
        holders: dict[int, tuple[nn.Module, str]] = {}
        self.first = {
            (module, name): holders.setdefault(id(parameter), (module, name))
            for module in names
            for name, parameter in module._parameters.items()
        }
        self._copies: dict[nn.Module, nn.Module] = {}  # inner modules come before those that hold them
        self._listener = _Listener()
        fake = detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)  # a rehearsal's own
        with fake:
            for module in names:
                self._copy(module)
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            fake,
            self._listener,
            _trunc_normal_as(self._heard_trunc),
        ):
            for twin in self._copies.values():
                try:
                    initialise(twin)
                except Exception:
                    # Most often a rule that reads values. Whatever it is, the drawing for real meets it again.
                    for parameter in twin.parameters():
                        rule = self._listener.rule_of(parameter)
                        if rule is not None:
                            rule.draw = None
        for module, rules in self.rules.items():
            for name, rule in rules.items():
                now = self._copies[module]._parameters.get(name)
                if now is None or self._listener.rule_of(now) is not rule:
                    rule.draw = None  # the module was given another tensor

    def _copy(self, module: nn.Module) -> nn.Module:
        """The module and those inside it with tensors of their own; a tied parameter has a rule in each module."""
        if module in self._copies:
            return self._copies[module]
        twin = copy.copy(module)
        twin._modules = {name: None if child is None else self._copy(child) for name, child in module._modules.items()}
        twin._parameters = _emptied(module._parameters)
        twin._buffers = {
            name: None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)
            for name, buffer in module._buffers.items()
        }
        rules = {name: _Rule(value) for name, value in twin._parameters.items() if value is not None}
        self._listener.rules |= {rule.parameter.untyped_storage()._cdata: rule for rule in rules.values()}
        self.rules[module] = rules
        self._copies[module] = twin
        return twin

    def _heard_trunc(self, tensor: torch.Tensor, draw: Draw) -> bool:
        rule = self._listener.rule_of(tensor)
        if rule is not None:
            rule.hear(tensor, draw)
        return rule is not None

    def _is_without_memory(self, tensor: torch.Tensor, draw: Draw) -> bool:
        return self._listener.rule_of(tensor) is not None

    def really(self, module: nn.Module, seed: str) -> dict[str, torch.Tensor]:
        """The module's whole parameters, filled on the CPU by its own rule and those of the modules that hold it."""
        twin = self._copies[module]
        without_memory, twin._parameters = twin._parameters, _emptied(module._parameters)
        digest = hashlib.sha256(seed.encode()).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _trunc_normal_as(self._is_without_memory):
                for value in twin.parameters(recurse=False):
                    if value.is_floating_point():
                        value.fill_(torch.nan)  # tells what no rule fills
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                for holder in self._copies.values():
                    if any(inner is twin for inner in holder.modules()):
                        self.initialise(holder)
            return {name: value for name, value in twin._parameters.items() if value is not None}
        finally:
            twin._parameters = without_memory


def _emptied(parameters: Mapping[str, torch.Tensor | None]) -> dict[str, nn.Parameter | None]:
    return {name: None if value is None else _parameter(value) for name, value in parameters.items()}


def _parameter(like: torch.Tensor) -> nn.Parameter:
    memory = torch.empty(like.shape, dtype=like.dtype)
    with trace.quiet():  # of a fake tensor an alias is made first
        return nn.Parameter(memory, requires_grad=like.requires_grad)


@contextmanager
def _trunc_normal_as(takes: Callable[[torch.Tensor, Draw], bool]) -> Iterator[None]:
    """Truncated normals go to ``takes`` (tensor, draw) first, and are left to torch where it answers no.

    torch draws them in a loop that reads values, which tensors without memory do not have. Where torch lacks the
    function replaced here, that loop is met, cannot be followed, and the parameter is drawn whole.
    """
    init: Any = torch.nn.init
    own: Any = getattr(init, "_no_grad_trunc_normal_", None)

    def trunc(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if not takes(tensor, partial(trunc_normal, mean=mean, std=std, a=a, b=b)):
            own(tensor, mean, std, a, b, generator=generator)
        return tensor

    if own is not None:
        init._no_grad_trunc_normal_ = trunc
    try:
        yield
    finally:
        if own is not None:
            init._no_grad_trunc_normal_ = own
