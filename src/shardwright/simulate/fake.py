"""A fake-tensor mode for rehearsals: short ways for what they do most.

A fake tensor has a shape, a dtype and a device, and no bytes. torch's FakeTensorMode also follows symbolic sizes and
constants, at a price that a rehearsal of thousands of operators pays for nothing: all its sizes are numbers. So here

| an operator of fake tensors on one device | is answered by                                                       |
|-------------------------------------------|-----------------------------------------------------------------------|
| that makes views, or communicates         | its kernel for the meta device                                       |
| that makes new tensors                    | that kernel the first time; then, for equal arguments, from memory   |
| that writes into a tensor                 | the same; what is remembered is which tensor it gives back           |
| that makes an empty one, or zeros or ones | FakeTensorMode the first time; then, for equal arguments, from memory|
| a grouped product that is not in bfloat16 | here: torch's rule for it knows no other element type                |
| the gradient of softplus                  | here: torch's rule lays it out in another order                      |
| of any other kind, or on anything else    | FakeTensorMode                                                       |

The kernel for the meta device checks shapes as the real one does, once for each set of arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from shardwright.errors import InputError

_aten = torch.ops.aten
_FOR_SYMBOLS_ONLY = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.copy_.default,
        _aten.embedding.default,
    }
)
"""Operators that torch treats apart for symbolic sizes, or for several devices: neither is met here."""

_CONSTRUCTORS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.ones_like.default,
        _aten.zeros.default,
        _aten.zeros_like.default,
    }
)
_GROUPED, _SOFTPLUS_BACKWARD = _aten._grouped_mm.default, _aten.softplus_backward.default

_USUAL, _ASKED, _KNOWN, _NEW = range(4)
"""How an operator is answered."""

_Answer = list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]] | int
"""What an operator makes: shape, strides, dtype and device of each tensor; or the place of the argument given back."""


class ShortFakeMode(FakeTensorMode):
    """FakeTensorMode with the short ways of this module."""

    def __init__(self) -> None:
        super().__init__()
        self._way_of: dict[Any, int] = {}
        self._known: dict[Any, _Answer] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        if func is _SOFTPLUS_BACKWARD:
            shape, strides = args[0].shape, compute_elementwise_output_strides(args[0], args[1])
            return args[0].new_empty_strided(shape, strides)
        way = self._way_of.get(func)
        if way is None:
            way = self._way_of[func] = _way(func)
        device = None if way in (_USUAL, _NEW) else self._common_device(args, kwargs)
        if device is None and (way != _NEW or not all(type(each) is FakeTensor for each in _given(args, kwargs))):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if way == _ASKED:
            return self._asked(func, args, kwargs, device)
        key = _key(func, args, kwargs)
        known = self._known.get(key)
        if known is None:
            if device is None:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            else:
                result = self._asked(func, args, kwargs, device)
            answer = _answer(result, args, kwargs)
            if answer is not None and key == _key(func, args, kwargs):
                self._known[key] = answer
            return result
        if isinstance(known, int):
            return _given(args, kwargs)[known]
        made = [FakeTensor(self, _empty(*each), each[-1]) for each in known]
        return made[0] if len(made) == 1 else tuple(made)

    def _common_device(self, args: Any, kwargs: Any) -> torch.device | None:
        """The device of all tensors; None where the usual way must be gone."""
        if kwargs and kwargs.get("device") is not None:
            return None
        found: torch.device | None = None
        for value in _leaves((args, tuple(kwargs.values())) if kwargs else args):
            if type(value) is not FakeTensor or value.fake_mode is not self or value.constant is not None:
                return None
            if found is None:
                found = value.fake_device
            elif found != value.fake_device:
                return None
        return found

    def _asked(self, func: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        """The answer of the kernel for the meta device."""
        with in_kernel_invocation_manager(self):
            result = func(*args, **(kwargs or {}))
        return self._wrapped(result, device)

    def _wrapped(self, result: Any, device: torch.device | None) -> Any:
        """New tensors as fake ones; a tensor that was given in is given back."""
        if isinstance(result, torch.Tensor):
            return result if type(result) is FakeTensor else FakeTensor(self, result, device)
        if isinstance(result, (tuple, list)):
            return type(result)(self._wrapped(each, device) for each in result)
        return result


def _way(func: Any) -> int:
    """How an operator may be answered, by its schema and by what torch knows of it."""
    if func in _CONSTRUCTORS:
        return _NEW
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "c10d"):
        return _USUAL
    if func not in _FOR_SYMBOLS_ONLY and any(matters(func) for matters, _ in fake_impls.op_implementations_checks):
        return _USUAL
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "Meta"):
        return _USUAL
    writes = any(argument.is_write for argument in func._schema.arguments)
    views = not writes and any(returned.alias_info is not None for returned in func._schema.returns)
    return _ASKED if views or func.namespace == "c10d" else _KNOWN


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any, **more: Any
) -> torch.Tensor:
    """The memory of a grouped product: rows of a [S,K] by groups times b [G,K,N], or columns of a [M,S] times b [S,N].

    Rows of the result begin at multiples of 16 bytes; so must those of a and b, or torch's kernel refuses them.
    """
    if any(value is not None for value in (*rest, *more.values())) or a.dim() != 2 or offs is None:
        raise InputError(
            f"grouped product: found {a.dim()} by {b.dim()} dimensions; allowed: groups of rows or columns"
        )
    unit = 16 // a.element_size()
    for each in (a, b):
        pitch = max(each.stride()[-2:])
        if pitch % unit:
            raise InputError(f"grouped product: found rows of {pitch} elements; allowed: multiples of 16 bytes")
    pitch = -(-b.shape[-1] // unit) * unit
    if b.dim() == 3:
        return a.new_empty_strided((a.shape[0], b.shape[-1]), (pitch, 1))
    rows = a.shape[0]
    return a.new_empty_strided((offs.shape[0], rows, b.shape[-1]), (rows * pitch, pitch, 1))


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    return (func, *_described(args), *(_described(kwargs.items()) if kwargs else ()))


def _leaves(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _leaves(value)


def _described(values: Any) -> Iterator[Any]:
    """Arguments as parts of a key; numbers with their types, since 1, 1.0 and True are equal."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.shape, value.stride(), value.dtype, value.device
        elif isinstance(value, (list, tuple)):
            yield tuple(_described(value))
        else:
            yield type(value), value


def _given(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return list(_leaves((args, tuple(kwargs.values())) if kwargs else args))


def _answer(result: Any, args: Any, kwargs: Any) -> _Answer | None:
    """What can be remembered of a result: a tensor that was given, or tensors that fill storages of their own."""
    given = _given(args, kwargs)
    place = next((place for place, each in enumerate(given) if each is result), None)
    if place is not None:
        return place
    made = (result,) if isinstance(result, torch.Tensor) else result
    if not isinstance(made, tuple) or not all(isinstance(each, torch.Tensor) for each in made):
        return None
    old = {each.untyped_storage()._cdata for each in given}
    answer = [(each.shape, each.stride(), each.dtype, each.device) for each in made]
    own = all(each.untyped_storage()._cdata not in old for each in made)
    sizes = [_empty(*each).untyped_storage().nbytes() for each in answer]
    return answer if own and sizes == [each.untyped_storage().nbytes() for each in made] else None


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, _: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
