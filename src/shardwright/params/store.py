"""The store of one model's parameters: which parameter group each joins, and where its shard lies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.errors import InputError
from shardwright.params import hooks
from shardwright.params.parameter_group import ParameterGroup
from shardwright.params.schedule import Schedule
from shardwright.params.stored import StoredParameter
from shardwright.runtime.runtime import Runtime, names_of
from shardwright.spec.mesh import chunk
from shardwright.spec.sharding import Sharding
from shardwright.values.initial import Source
from shardwright.values.placement import Cut, cut_of, make_parameter

Storage = tuple[DeviceMesh, list[Placement], tuple[str, ...]]
"""(mesh, placements, axes that split storage): where a parameter's shard lies."""


def whole(param_group: str) -> Sharding:
    """Every rank stores its parameter groups whole."""
    return Sharding()


class ParameterStore:
    """Places parameters, each in its parameter group, all parameter groups on one schedule.

    sharding_of: parameter group name → how it is stored. group_of: qualified parameter name → parameter group name; by
    default the module. in_flight: how many parameter groups may be gathered at once. unused_are_zeros: ranks may use
    different parameters.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        sharding_of: Callable[[str], Sharding] = whole,
        group_of: Callable[[str], str] = lambda name: name.rpartition(".")[0],
        in_flight: int = 2,
        unused_are_zeros: bool = False,
    ):
        self.mesh = mesh
        self.runtime = Runtime.of(mesh)
        self.schedule = Schedule(in_flight, unused_are_zeros)
        self._places: list[tuple[weakref.ref[nn.Module], str, StoredParameter, str]] = []
        self._sharding_of, self._group_of = sharding_of, group_of
        self._param_groups: dict[str, ParameterGroup] = {}

    def param_group(self, parameter: str) -> ParameterGroup:
        """The parameter group of the parameter of that qualified name."""
        name = self._group_of(parameter)
        if name not in self._param_groups:
            self._param_groups[name] = self.schedule.new_param_group(name, self._sharding_of(name))
        return self._param_groups[name]

    def join(self, inner: ParameterStore, prefix: str) -> None:
        """What ``inner`` stores, of the submodule ``prefix``, is this store's from now on."""
        self._places += [(module, key, stored, f"{prefix}.{name}") for module, key, stored, name in inner._places]
        self.schedule.join(inner.schedule, prefix)
        for stored in dict.fromkeys(stored for _, _, stored, _ in inner._places):
            stored.schedule, stored.name = self.schedule, f"{prefix}.{stored.name}"

    def let_ranks_agree(self, gathers: bool = True) -> None:
        """From now on ranks tell each other what they are about to communicate; every rank calls this.

        At the start of a forward, at both ends of a backward, and before each of the ``gathers``.
        """
        self.schedule.agrees_on_gathers = gathers
        self.schedule.reductions.alike = not gathers
        partial = {axis for stored in self.schedule.reductions.members for axis in stored.partial_axes}
        group = self.runtime.group(tuple(axis for axis in self.runtime.sizes if axis in partial))
        if group.size > 1:
            self.schedule.reductions.agreement = self.runtime.agreement(group)

    def watch(self, module: nn.Module, key: str, stored: StoredParameter, qualified: str) -> None:
        """``module.key`` is ``stored``; ``check_places`` will look whether it still is."""
        self._places.append((weakref.ref(module), key, stored, qualified))

    def watch_layers(self, model: nn.Module) -> None:
        """As ``watch``, for every layer of ours in ``model``."""
        for name, module in model.named_modules():
            if not hasattr(module, "stored_parameters"):
                continue
            stored_by_parameter = {stored.parameter: stored for stored in cast(Any, module).stored_parameters()}
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter in stored_by_parameter:
                    self.watch(module, key, stored_by_parameter[parameter], f"{name}.{key}")

    def begin_forward(self, *_: Any) -> None:
        """Before a model's forward: parameters are those that are stored, and what is gathered is as they are."""
        if torch._C._current_graph_task_id() == -1:
            self.check_places()
            self.schedule.begin_forward()

    def check_places(self) -> None:
        """Parameters that were replaced are taken in, if they are stored alike.

        Raises InputError for any other, and for one that was converted to another element type.
        """
        for reference, key, stored, qualified in self._places:
            module = reference()
            if module is None:
                continue
            found = module._parameters.get(key)
            if found is not stored.parameter or found.dtype != stored.stored_dtype:
                _adopt(stored, found, qualified)
            if stored.trains and stored.communicates:
                hooks.guard(stored.parameter, qualified)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InputError(
            "deepcopy: found a sharded module; allowed: a copy made before it is sharded, or of its state_dict()"
        )

    def place(
        self,
        source: Source,
        module: nn.Module,
        name: str,
        qualified: str,
        placements: Sequence[Placement],
        partial: tuple[str, ...],
        owner: str,
        mesh: DeviceMesh | None = None,
    ) -> tuple[StoredParameter, Cut]:
        """(the stored form of ``module.name``, the part of it that this rank uses).

        placements: of the used tensor, on every axis of the mesh. partial: the axes over which its gradient is partial.
        mesh: by default the store's; one of ``Runtime.unflattened_mesh`` where ranks share what they hold.
        """
        dense: Any = getattr(module, name)
        base = mesh or self.mesh
        used = cut_of(dense.shape, base, placements)
        param_group = self.param_group(qualified)
        sharding = param_group.sharding if dense.shape else Sharding()  # a scalar has no rows
        stored_on, placed, storage = storage_of(sharding, self.runtime, base, placements, partial)
        local = source(module, name, cut_of(dense.shape, stored_on, placed))
        parameter = make_parameter(local, dense.shape, stored_on, placed, dense.requires_grad)
        hooks.move(dense, parameter)
        rows = used.local_shape[0] if storage else None
        return StoredParameter(parameter, self.runtime, partial, owner, self.schedule, param_group, storage, rows), used

    def take_over(self, stored: StoredParameter, qualified: str) -> None:
        """Stores a parameter that is stored whole so far as its parameter group here says; ``stored.parameter`` is
        another then.

        Raises InputError where its storage is split already.
        """
        old: Any = stored.parameter
        if stored.gather_group.size > 1:
            raise InputError(f"{qualified}: found storage that is split already; allowed: one that is whole")
        param_group = self.param_group(qualified)
        placed = storage_of(param_group.sharding, self.runtime, old.device_mesh, old.placements, stored.partial_axes)
        mesh, placements, storage = placed
        local = stored.local
        rows = local.shape[0] if storage else None
        if storage:
            group = self.runtime.group(storage)
            start, stop = chunk(local.shape[0], group.size, group.index)
            local = local[start:stop].clone()
        parameter = make_parameter(local, old.shape, mesh, placements, old.requires_grad)
        stored.store_as(parameter, self.schedule, param_group, storage, rows)


def storage_of(
    sharding: Sharding, runtime: Runtime, mesh: DeviceMesh, placements: Sequence[Placement], partial: tuple[str, ...]
) -> Storage:
    """Where the shard of a parameter with those placements lies.

    Storage is split over those of the parameter group's axes over which the gradient is partial, so that reducing a
    gradient is always one reduce-scatter; on the others (axes that split W itself, or repeat the work) it is as used.
    """
    by_axis = dict(zip(names_of(mesh), placements, strict=True))
    wanted = tuple(axis for axis in by_axis if sharding.split and axis in sharding.axes)
    storage = tuple(axis for axis in wanted if axis in partial)
    if runtime.group(wanted).size == 1:
        return mesh, list(placements), ()
    joined = storage or wanted  # an unsplit parameter lies on the mesh of its neighbours, as far as it can
    if not storage and any(not isinstance(by_axis[axis], Replicate) for axis in wanted):
        return mesh, list(placements), ()
    last: Placement = Shard(0) if storage else Replicate()
    others = [by_axis[axis] for axis in by_axis if axis not in joined]
    target = runtime.storage_mesh(joined, mesh)
    return target, [*others, last], storage if runtime.group(storage).size > 1 else ()


def _adopt(stored: StoredParameter, found: torch.Tensor | None, name: str) -> None:
    """Takes ``found``, which a module holds now under ``name``, for what is stored, if it is stored alike.

    Raises InputError where it is no such parameter, or has become one of another element type.
    """
    old: Any = stored.parameter
    if found is not old:
        alike = (
            isinstance(found, DTensor)
            and isinstance(found, nn.Parameter)
            and (found.shape, found.device_mesh, found.placements) == (old.shape, old.device_mesh, old.placements)
        )
        if not alike:
            what = "none" if found is None else f"a {type(found).__name__} of shape {tuple(found.shape)}"
            raise InputError(
                f"{name}: found {what} in the place of a sharded parameter; allowed: its values changed in place "
                "(copy_, load_state_dict without assign), or a parameter replaced before it is sharded"
            )
        stored.replace(cast(nn.Parameter, found))
    if stored.parameter.dtype != stored.stored_dtype:
        raise InputError(
            f"{name}: found {stored.parameter.dtype}; allowed: {stored.stored_dtype}, as it was stored (convert the "
            "model before it is sharded)"
        )
