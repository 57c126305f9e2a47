"""Sharded parameters in anyone's module: ``shard`` stores them, and unshards them while a group's module runs.

unshard_hooks.py tells what happens around each forward; this file says which modules are groups, and places parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright.errors import InputError
from shardwright.files.sizes import parse_bytes
from shardwright.params.schedule import Schedule
from shardwright.params.store import ParameterStore
from shardwright.params.stored import StoredParameter
from shardwright.spec.sharding import HYBRID, LEVELS, Sharding, hybrid_axes, kept, named_level, one_level
from shardwright.unsharding.mixed_precision import MixedPrecision, chosen_types
from shardwright.unsharding.places import Place
from shardwright.unsharding.retired import RetiredParameter, retire
from shardwright.unsharding.root import Root
from shardwright.unsharding.sharded_module import ROOT, give_methods
from shardwright.unsharding.unshard_hooks import UnshardHooks
from shardwright.values.initial import Source, from_values

REDUCE = ("sum", "mean")
"""What a gradient is of the ranks' gradients."""

UNUSED = ("error", "zeros")
"""What a parameter is to a rank that does not use it while others do."""


@dataclass(frozen=True)
class Call:
    """What one call of ``shard`` states for all of its parameter groups. ignored: ids of parameters left alone."""

    in_flight: int = 2
    groups: Sequence[str] | None = None
    source: Source = from_values
    unused_are_zeros: bool = False
    checks: bool = True
    ignored: frozenset[int] = frozenset()


def shard(
    module: nn.Module,
    mesh_axes: DeviceMesh,
    level: str | Mapping[str, str] = "parameters",
    *,
    keep: bool = False,
    reshard_after_forward: bool | None = None,
    in_flight: int = 2,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    bucket: str | int = 0,
    groups: Sequence[str] | None = None,
    reduce: str = "sum",
    unused: str = "error",
    checks: bool = True,
    ignored_parameters: Collection[str | nn.Parameter] = (),
    mixed_precision: MixedPrecision | None = None,
    source: Source = from_values,
) -> nn.Module:
    """Stores the parameters of ``module`` over the axes of ``mesh_axes``, in place; returns it, a ShardedModule.

    mesh_axes: the (sub)mesh over whose axes the data are split. level: one word of ``replicate``, ``optimizer``,
    ``gradients``, ``parameters`` for all axes, or {axis: word} (hybrid: {"replica": "replicate", "shard":
    "parameters"}), or ``ddp``, ``ZeRO-1`` to ``ZeRO-3``, ``fsdp``, ``hsdp`` (parameters over the last axis, replicated
    over the others). keep: W stays gathered from forward to backward; reshard_after_forward=False says the same.
    in_flight: parameter groups gathered at once. dtype: element type in which the module computes (by default the
    parameters'); gradients travel in it, and are added up in reduce_dtype (by default the parameters'). bucket: bytes,
    or a size such as "25MiB", of the buffer in which small gradients travel together; 0 is none. groups: patterns
    of names of the modules that are gathered as one; by default every block (a member of an nn.ModuleList or
    nn.Sequential), and each other module with parameters of its own. The pattern "" makes one parameter group, kept
    while the root's forward runs, of what no other parameter group holds. reduce: gradients are the ``sum`` of the
    ranks' gradients, or their ``mean``, as FSDP2's and DDP's are. unused: where ranks use different parameters in one
    backward, ``error`` raises DivergenceError, which names one and the ranks; ``zeros`` is exact: what a rank does not
    use has a gradient of zero there (at level ``parameters`` every rank must call the same groups). checks: ranks
    agree, by a message of 32 bytes, before each gather and at both ends of a backward, so that a difference is an error
    and no wrong result; False trusts that all ranks run alike. source: where shards get their values, by default from
    the module (equal on every rank). ignored_parameters: names, or the parameters themselves, that stay as they are:
    plain, not reduced, not counted. mixed_precision: dtype and reduce_dtype in one object.

    Bottom-up: call it on blocks, then on the module around them. What an inner call has sharded stays as that call
    says (level, axes, keep, element types, bucket, groups); from the outer call on all is one store with one schedule,
    whose in_flight is the outer call's. The groups of inner calls are released when the whole forward is over. Calls
    that disagree on the mesh, reduce, unused or checks are refused.

    Parameters become DTensors, and so do their gradients, which are complete when backward returns. They are sums over
    ranks unless told: then a loss is to be divided by what it is a mean over, on all ranks together.
    Make the optimizer afterwards. Linears that lie on a grid already are stored over the axes beside the grid's.

    Hooks on parameters are called with the reduced gradient. A weight that is read outside of its module's call gets no
    gradient: backward refuses it. Raises InputError where an axis or a level is unknown, or parameter groups match
    nothing, where a module is sharded twice, and where an ignored parameter is none of the module's.
    """
    _check_words(reduce, unused, checks)
    policy = chosen_types(mixed_precision, dtype, reduce_dtype)
    sharding = _sharding(mesh_axes, level, (keep, reshard_after_forward), policy, parse_bytes(bucket, "bucket"))
    axes = mesh_axes.mesh_dim_names or ()
    call = Call(in_flight, groups, source, unused == "zeros", checks, _ignored(module, ignored_parameters))
    divisor = mesh_axes.size() if reduce == "mean" else 1
    shard_groups(module, mesh_axes._get_root_mesh(), axes, lambda _: sharding, call, divisor)
    return give_methods(module)


def _check_words(reduce: str, unused: str, checks: bool) -> None:
    for name, word, allowed in (("reduce", reduce, REDUCE), ("unused", unused, UNUSED)):
        if word not in allowed:
            raise InputError(f"{name}: found {word!r}; allowed: {', '.join(allowed)}")
    if unused == "zeros" and not checks:
        raise InputError("checks: found False beside unused='zeros'; allowed: True, since ranks must agree then")


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, gradients of a module that ``shard`` stores, or of a parallelized model, are not reduced.

    Each backward adds them up in ``.grad``, whole and in the stored element type, as a DTensor whose placement is
    partial; the next one outside reduces all. For micro-batches but the last: fewer bytes travel, more are held. A
    sharded level holds whole gradients then. ``zero_grad``, and an exception in a backward, forget what was added up.
    """
    return _schedule(module).reductions.accumulate(LEVELS)


def discard_accumulated(module: nn.Module) -> None:
    """Forgets the gradients that backwards inside ``no_sync`` have accumulated and none has reduced."""
    _schedule(module).reductions.discard_accumulated()


def _schedule(module: nn.Module) -> Schedule:
    store = getattr(module, "parameter_store", None)
    if store is None:
        raise InputError(f"module: found a {type(module).__name__} that is not sharded; allowed: what shard returned")
    schedule: Schedule = store.schedule
    return schedule


def shard_groups(
    module: nn.Module,
    mesh: DeviceMesh,
    axes: tuple[str, ...],
    sharding_of: Callable[[str], Sharding],
    call: Call,
    divisor: int = 1,
) -> nn.Module:
    """As ``shard``, each parameter group as ``sharding_of`` its name says. axes: those of ``mesh`` over which data are
    split. divisor: of sums of gradients over ranks.
    """
    inner_roots = _inner_roots(module)
    names = _param_group_names(module, call.groups)
    store = ParameterStore(mesh, sharding_of, _param_group_finder(names), call.in_flight, call.unused_are_zeros)
    modules = {name: inner for name, inner in module.named_modules() if not _is_inside(name, inner_roots)}
    places = _place_all(modules, store, axes, call, names)
    for stored in store.schedule.reductions.members:
        stored.divisor = divisor
    root = Root(module, store, places, call.checks, divisor)
    for name, inner_root in inner_roots.items():
        root.join(inner_root, name)
        cast(Any, module.get_submodule(name)).parameter_store = store
    if call.checks:
        store.let_ranks_agree()
    module.register_forward_pre_hook(root.begin)  # before the hooks of its group
    for name, inner in modules.items():
        param_group = _innermost(names, name)
        below = [place for place in places if _holds(name, place.holder) and place.param_group == param_group]
        if below:
            root.hooks.append(UnshardHooks(inner, store.schedule, root.saved, below, root.shown))
    module.register_forward_hook(root.end, always_call=True)  # after them
    cast(Any, module).parameter_store = store
    module.__dict__[ROOT] = root
    if hasattr(module, "save_pretrained"):
        module.__dict__["save_pretrained"] = _refuse_to_save
    return module


def _inner_roots(module: nn.Module) -> dict[str, Root]:
    """The outermost submodules that earlier calls were made on. Raises InputError where one was made on ``module``."""
    if ROOT in module.__dict__:
        raise InputError(
            f"module: found a {type(module).__name__} that is sharded already; allowed: one call for each "
            "module, inner modules first"
        )
    found: dict[str, Root] = {}
    for name, inner in module.named_modules():
        if ROOT in inner.__dict__ and not _is_inside(name, found):
            found[name] = inner.__dict__[ROOT]
    return found


def _is_inside(name: str, outer: Collection[str]) -> bool:
    return any(_holds(each, name) for each in outer)


def _ignored(module: nn.Module, chosen: Collection[str | nn.Parameter]) -> frozenset[int]:
    """The ids of parameters that stay as they are. Raises InputError for one that is none of ``module``'s."""
    named = dict(module.named_parameters(remove_duplicate=False))
    ids = {id(parameter) for parameter in named.values()}
    for each in chosen:
        if each not in named if isinstance(each, str) else id(each) not in ids:
            found = repr(each) if isinstance(each, str) else f"a parameter of shape {tuple(each.shape)}"
            raise InputError(f"ignored_parameters: found {found}; allowed: parameters of the module, or their names")
    return frozenset(id(named[each]) if isinstance(each, str) else id(each) for each in chosen)


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    """In the place of Hugging Face's method, which would write this rank's shards."""
    raise InputError(
        "save_pretrained: found sharded parameters; allowed: sw.save_pretrained(model, directory), called on every rank"
    )


def param_groups_of(module: nn.Module) -> Callable[[str], str]:
    """Qualified parameter name → name of the parameter group that ``shard_groups`` would put it in."""
    return _param_group_finder(_param_group_names(module, None))


def _param_group_finder(names: Sequence[str]) -> Callable[[str], str]:
    def unit_of(parameter: str) -> str:
        holder = parameter.rpartition(".")[0]
        param_group = _innermost(names, holder)
        return holder if param_group is None else param_group

    return unit_of


def _sharding(
    mesh: DeviceMesh,
    level: str | Mapping[str, str],
    keep: tuple[bool, bool | None],
    policy: MixedPrecision,
    bucket: int,
) -> Sharding:
    axes = mesh.mesh_dim_names or ()
    if isinstance(level, str) and named_level(level) == HYBRID:
        level = dict.fromkeys(hybrid_axes(axes), "parameters")
    words = dict.fromkeys(axes, level) if isinstance(level, str) else dict(level)
    for axis in words:
        if axis not in axes:
            raise InputError(f"level: found axis {axis!r}; allowed: the mesh's axes ({', '.join(axes)})")
    words = {axis: one_level(word) for axis, word in words.items()}
    split = tuple(axis for axis in axes if words.get(axis, "replicate") != "replicate")
    chosen = sorted({words[axis] for axis in split}) or ["replicate"]
    if len(chosen) > 1:
        raise InputError(f"level: found {' and '.join(chosen)}; allowed: one level beside 'replicate'")

    def name(kind: torch.dtype | None) -> str | None:
        return None if kind is None else str(kind).removeprefix("torch.")

    return Sharding(chosen[0], split, kept(chosen[0], *keep), name(policy.dtype), name(policy.reduce_dtype), bucket)


def _param_group_names(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    modules = dict(module.named_modules())
    if patterns is None:
        chosen = [name for name in modules if _is_block(name, modules)]
    else:
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in modules):
                raise InputError(
                    f"groups: found no module for {pattern!r}; allowed: patterns of the module's own names"
                )
        chosen = [name for name in modules if any(_matches(name, pattern) for pattern in patterns)]
    left = [
        name
        for name, inner in modules.items()
        if inner._parameters and not any(_holds(outer, name) for outer in chosen)
    ]
    return [name for name in modules if name in chosen or name in left]


def _matches(name: str, pattern: str) -> bool:
    """Part by part: a ``*`` stands for one part of a name, so "layers.*" is the layers and not what is inside them."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _is_block(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the module is a member of a list, and no part of another such member; it has parameters."""
    parts = name.split(".")
    outer = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    members = [each for each in outer if isinstance(modules[each.rpartition(".")[0]], (nn.ModuleList, nn.Sequential))]
    return members[:1] == [name] and any(True for _ in modules[name].parameters())


def _holds(outer: str, name: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _innermost(groups: Sequence[str], name: str) -> str | None:
    """The parameter group that the module of that name lies in, if any."""
    return max((param_group for param_group in groups if _holds(param_group, name)), key=len, default=None)


def _place_all(
    modules: Mapping[str, nn.Module], store: ParameterStore, axes: tuple[str, ...], call: Call, groups: Sequence[str]
) -> list[Place]:
    """Stores every parameter of ``modules`` that is not ignored; where plain modules use one."""
    own = [inner for inner in modules.values() if hasattr(inner, "stored_parameters")]
    found = {stored.parameter: stored for inner in own for stored in cast(Any, inner).stored_parameters()}
    moved, replaced = set[StoredParameter](), list[torch.Tensor]()
    places: list[Place] = []
    for name, inner in modules.items():
        for key, parameter in list(inner._parameters.items()):
            if parameter is None or id(parameter) in call.ignored:
                continue
            qualified = f"{name}.{key}" if name else key
            stored = found.get(parameter)
            if stored is None:
                if isinstance(parameter, RetiredParameter):
                    raise InputError(
                        f"{qualified}: found a parameter that an inner call has sharded in another module, which "
                        "shares it; allowed: both modules in one call"
                    )
                if isinstance(parameter, DTensor):
                    raise InputError(
                        f"{qualified}: found a DTensor; allowed: plain parameters, and shardwright's layers"
                    )
                whole = [Replicate()] * store.mesh.ndim
                stored, _ = store.place(call.source, inner, key, qualified, whole, axes, qualified)
                replaced.append(parameter)
            elif inner in own and stored not in moved:
                store.take_over(stored, qualified)
            moved.add(stored)
            found[parameter] = stored
            inner._parameters[key] = stored.parameter
            store.watch(inner, key, stored, qualified)
            if inner not in own:
                places.append(Place(name, weakref.ref(inner), key, stored, _innermost(groups, name) or ""))
    for old in replaced:
        retire(old)
    return places
