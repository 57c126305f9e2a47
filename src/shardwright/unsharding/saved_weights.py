"""What a graph saves of an unsharded W: not the memory, but how to have it again.

While a module with unsharded parameters runs, saved-tensor hooks see every tensor that backward will read. A tensor on
the memory of a W is replaced by a handle, and when backward asks for it, the schedule is asked for W: so W is there
whichever way a gradient came into the module, by its output or beside it. Everything else goes to the pair of hooks
below (a recorder's, a checkpoint's), as only the innermost pair is called; without one it is kept as autograd would,
its version checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from shardwright.params.stored import StoredParameter

_autograd: Any = torch._C._autograd
Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Reader(Protocol):
    """The call of a module whose backward will read W."""

    def need_weights(self) -> None:
        """A gradient has come into the call: every W of it is to be there."""


class Handle:
    """A tensor on the memory of ``stored``'s W, as its geometry. The graph node that needs it holds it."""

    __slots__ = ("__weakref__", "dtype", "offset", "reader", "size", "stored", "stride", "version")

    def __init__(self, tensor: torch.Tensor, stored: StoredParameter, reader: Reader):
        self.stored, self.reader, self.version = stored, reader, stored.version
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        """The tensor again, on W as it is gathered now."""
        self.reader.need_weights()
        self.stored.check_unmodified(self.version)
        whole = self.stored.lease_whole()
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


class SavedWeights:
    """The hooks of one store, and which memory is whose while modules run."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[StoredParameter, Reader, weakref.WeakSet[Handle]]] = {}
        self._own: list[Any] = []  # pack hooks of ours that are in force

    def watch(
        self, whole: torch.Tensor, stored: StoredParameter, reader: Reader, handles: weakref.WeakSet[Handle]
    ) -> None:
        """From now on the memory of ``whole`` is that of ``stored``'s W; ``handles``: those that graphs hold on it."""
        self._watched[whole.untyped_storage()._cdata] = stored, reader, handles

    def unwatch(self, stored: StoredParameter) -> None:
        """No module sees the W of ``stored`` any more."""
        self._watched = {key: watched for key, watched in self._watched.items() if watched[0] is not stored}

    def push(self) -> bool:
        """Puts the hooks in force, unless they are the innermost pair already; whether ``pop`` is due."""
        below: Pair | None = _autograd._top_saved_tensors_default_hooks(True)
        if below is not None and any(below[0] is pack for pack in self._own):
            return False
        pack, unpack = self._over(below)
        self._own.append(pack)
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
        return True

    def pop(self) -> None:
        """Ends what ``push`` began."""
        self._own.pop()
        _autograd._pop_saved_tensors_default_hooks()

    def _over(self, below: Pair | None) -> Pair:
        def pack(tensor: torch.Tensor) -> Any:
            watched = self._watched.get(tensor.untyped_storage()._cdata)
            if watched is not None and not (tensor.is_conj() or tensor.is_neg()):
                stored, reader, handles = watched
                handle = Handle(tensor, stored, reader)
                handles.add(handle)
                return handle
            if below is not None:
                return below[0](tensor)
            return tensor.detach(), tensor._version

        def unpack(kept: Any) -> torch.Tensor:
            if isinstance(kept, Handle):
                return kept.tensor()
            if below is not None:
                return below[1](kept)
            tensor, version = cast(tuple[torch.Tensor, int], kept)
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected {version}"
                )
            return tensor

        return pack, unpack
