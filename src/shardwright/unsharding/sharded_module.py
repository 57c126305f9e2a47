"""The methods that a module has once ``shard`` was called on it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwright.errors import InputError
from shardwright.unsharding.root import Root

ROOT = "_shard_root"
"""The key under which a module that ``shard`` was called on holds what happens around its forward."""


class UnshardHandle:
    """An unshard that is under way."""

    def __init__(self, root: Root):
        self._root = root

    def wait(self) -> None:
        """Until the parameters are there; the modules show them."""
        self._root.wait()


class ShardedModule:
    """A module that ``shard`` was called on: also of the class that it had before, whose name stays.

    The methods concern the parameters of that call: those of inner calls have methods on their own modules. Every rank
    calls them alike.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters: ``module.weight`` is a plain whole tensor [as the module reads it], to read only.

        They stay until the module's next forward, which gathers nothing again and shows what it would without this, or
        until ``reshard``; ``in_flight`` does not count them. ``parameters()`` and ``state_dict()`` are the DTensors all
        the while; values that were written to ``module.weight`` meanwhile are lost. async_op: returns a handle at once,
        whose ``wait`` does the rest.
        """
        root = _root_of(self)
        root.unshard()
        handle = UnshardHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Releases the gathered parameters, with ``keep`` too; those that a forward or a backward is at work with stay,
        and so does W of the levels that hold it beside its shard.
        """
        _root_of(self).reshard()

    def set_modules_to_forward_prefetch(self, modules: Sequence[ShardedModule]) -> None:
        """In forward, the parameters of ``modules`` are gathered ahead when this module's are asked for.

        Once a list is stated, no order that was learnt counts in forward; a module without a list gathers nothing
        ahead. An empty list takes it back. Raises InputError where this module's call has not one parameter group,
        where ``modules`` are not of one model with it, and for more groups than ``in_flight`` - 1.
        """
        _root_of(self).gather_ahead("forward", [_root_of(module) for module in modules])

    def set_modules_to_backward_prefetch(self, modules: Sequence[ShardedModule]) -> None:
        """As ``set_modules_to_forward_prefetch``, in backward: when this module's gradients begin to travel."""
        _root_of(self).gather_ahead("backward", [_root_of(module) for module in modules])


def give_methods(module: nn.Module) -> nn.Module:
    """``module``, a ShardedModule from now on."""
    module.__class__ = _sharded_class(type(module))
    return module


def _sharded_class(kind: type) -> type:
    """One for all modules of a class, so that modules of one class stay so."""
    for known in ShardedModule.__subclasses__():
        if known.__bases__ == (ShardedModule, kind):
            return known
    return type(
        kind.__name__, (ShardedModule, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )


def _root_of(module: object) -> Root:
    root: Root | None = getattr(module, "__dict__", {}).get(ROOT)
    if root is None:
        raise InputError(f"module: found a {type(module).__name__} that is not sharded; allowed: what shard returned")
    return root
