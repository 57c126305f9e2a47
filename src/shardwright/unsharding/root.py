"""The module that a call of ``shard`` was made on: what happens around its forward, and how it joins an outer call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.params.schedule import Schedule
from shardwright.params.store import ParameterStore
from shardwright.unsharding.places import Place, ShownParameters
from shardwright.unsharding.saved_weights import SavedWeights
from shardwright.unsharding.unshard_hooks import UnshardHooks, refuse_compile, refuse_copy


class Root:
    """Around the forward of the whole module: parameters are still those that are stored, and W is as they are.

    The group that was used last stays gathered, since backward begins with it. But where the forward of another store
    follows, this one is a part of something larger, as blocks are that are sharded one by one: it releases all then,
    and from now on. Groups of inner calls of ``shard`` (``joined``) are released after the forward in any case.
    """

    def __init__(self, module: nn.Module, store: ParameterStore, places: Sequence[Place], checks: bool, divisor: int):
        self.name, self.store, self.is_part = type(module).__name__, store, False
        self.places, self.checks, self.divisor = places, checks, divisor
        self.shown = ShownParameters()
        self.saved, self.hooks = SavedWeights(), list[UnshardHooks]()
        self.joined: list[Root] = []
        self.param_groups = list(store.schedule.param_groups)  # of this call; those of inner calls aside

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def begin(self, *_: Any) -> None:
        schedule = self.store.schedule
        schedule.inside += 1
        refuse_compile(self.name)
        if schedule.inside == 1:
            self.store.check_places()
            before = self.store.runtime.left_gathered
            other: Root | None = None if before is None else before()
            follows = other is not None and other.store is not self.store and other.store.schedule.awaits_backward
            self.is_part = schedule.begin_forward(self.is_part or follows)
            if self.is_part and other is not None:
                other.is_part = True
                other.release()
            self.store.runtime.left_gathered = None

    def end(self, *_: Any) -> None:
        schedule = self.store.schedule
        schedule.inside = max(0, schedule.inside - 1)  # what is refused before it begins ends all the same
        if schedule.inside:
            return  # a forward inside another
        if not torch.is_grad_enabled():
            schedule.rest()
            return
        if torch._C._current_graph_task_id() != -1:
            return  # a replay
        self.store.runtime.left_gathered = weakref.ref(self)
        if self.is_part:
            self.release()
        for inner in self.joined:
            inner.release_own()

    def release(self) -> None:
        """Nothing stays gathered that no backward is at work with."""
        self.store.schedule.release_idle()

    def release_own(self) -> None:
        """The groups of this call do not stay gathered, nor do those of calls inside it."""
        self.store.schedule.release_idle(self.param_groups)
        for inner in self.joined:
            inner.release_own()

    def unshard(self) -> None:
        """Starts to gather the groups of this call."""
        self.shown.hide()
        for param_group in self.param_groups:
            self.store.schedule.hold(param_group)

    def wait(self) -> None:
        """Until the groups of this call are there; their modules show them."""
        for param_group in self.param_groups:
            param_group.wait()
        self.shown.show([place for place in self.places if place.stored.param_group.held])

    def reshard(self) -> None:
        """The modules have their DTensors again, and the groups of this call are released."""
        self.shown.hide()
        for param_group in self.param_groups:
            self.store.schedule.let_go(param_group)

    def gather_ahead(self, kind: str, roots: Sequence[Root]) -> None:
        """When the group of this call is asked for in a pass of ``kind``, those of ``roots`` are gathered ahead.

        Raises InputError where this call has not one group, a root is sharded apart from this one, or there are more
        groups than ``in_flight`` allows.
        """
        word, schedule = f"set_modules_to_{kind}_prefetch", self.store.schedule
        count = len(self.param_groups)
        if count != 1:
            raise InputError(f"{word}: found {count} parameter groups of {self.name} itself; allowed: 1 (groups=[''])")
        if any(root.store is not self.store for root in roots):
            raise InputError(
                f"{word}: found a module that is sharded apart; allowed: after the call on the whole model"
            )
        ahead = [param_group for root in roots for param_group in root.param_groups]
        if len(ahead) >= schedule.in_flight:
            raise InputError(
                f"{word}: found {len(ahead)} parameter groups ahead at in_flight {schedule.in_flight}; allowed: at "
                "most in_flight - 1 (state in_flight in the call on the whole model)"
            )
        stated = schedule.orders[kind].stated
        if ahead:
            stated[self.param_groups[0]] = ahead
        else:
            stated.pop(self.param_groups[0], None)

    def join(self, inner: Root, name: str) -> None:
        """What an inner call has sharded, the submodule ``name``, is a part of this: one store, one schedule.

        Raises InputError where the two calls state what can only be one for all: the mesh, ``reduce``, ``unused``,
        ``checks``. ``in_flight`` is that of this call.
        """
        ours, theirs = self.store.schedule, inner.store.schedule
        if inner.store.runtime is not self.store.runtime:
            raise InputError(f"mesh: found another in the call on {name}; allowed: axes of one mesh in all calls")
        stated = {
            "reduce": (_reduce_name(inner.divisor), _reduce_name(self.divisor)),
            "unused": (_unused_name(theirs), _unused_name(ours)),
            "checks": (str(inner.checks), str(self.checks)),
        }
        for word, (found, allowed) in stated.items():
            if found != allowed:
                raise InputError(
                    f"{word}: found {found} in the call on {name}; allowed: {allowed}, as in the call on the module "
                    "around it"
                )
        self.store.join(inner.store, name)
        inner.take_part(self.store, self.saved)
        self.joined.append(inner)

    def take_part(self, store: ParameterStore, saved: SavedWeights) -> None:
        """``store`` is that of this call, and of those inside it, from now on."""
        self.store, self.saved = store, saved
        for hooks in self.hooks:
            hooks.schedule, hooks.saved = store.schedule, saved
        for inner in self.joined:
            inner.take_part(store, saved)


def _reduce_name(divisor: int) -> str:
    return "'sum'" if divisor == 1 else f"'mean' over {divisor} ranks"


def _unused_name(schedule: Schedule) -> str:
    return "'zeros'" if schedule.unused_are_zeros else "'error'"
