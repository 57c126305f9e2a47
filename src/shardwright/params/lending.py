"""Sharded parameters in anyone's module: ``shard`` stores them, and lends them gathered while a unit's module runs.

| when                       | what                                                                                |
|----------------------------|-------------------------------------------------------------------------------------|
| before the unit's forward  | gather; the module sees plain tensors, each a leaf of the graph: a loan             |
| after it                   | the module has its DTensors back; W is released when the next unit is asked for     |
| gradient reaches an output | gather again, into the storage that the graph has kept                              |
| gradient reaches a loan    | it is deposited; when the unit's inputs have theirs, its backward is over           |

Loans share the storage of the gathered W, which has no memory between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright._errors import InputError
from shardwright._files import parse_bytes
from shardwright.params.initial import Source, from_values
from shardwright.params.schedule import Schedule
from shardwright.params.store import ParameterStore
from shardwright.params.stored import StoredParameter
from shardwright.params.unit import Unit, Use
from shardwright.sharding import LEVELS, Sharding


def shard(
    module: nn.Module,
    mesh_axes: DeviceMesh,
    level: str | Mapping[str, str] = "parameters",
    *,
    keep: bool = False,
    in_flight: int = 2,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    bucket: str | int = 0,
    units: Sequence[str] | None = None,
    source: Source = from_values,
) -> nn.Module:
    """Stores the parameters of ``module`` over the axes of ``mesh_axes``, in place; returns it.

    mesh_axes: the mesh (or submesh) over whose axes the data are split. level: one word of ``replicate``,
    ``optimizer``, ``gradients``, ``parameters`` for all axes, or {axis: word} (hybrid: {"replica": "replicate",
    "shard": "parameters"}). keep: W stays gathered from forward to backward. in_flight: units gathered at once.
    dtype: element type in which the module computes (by default the parameters'); gradients travel in it, and are
    added up in reduce_dtype (by default the parameters'). bucket: bytes, or a size such as "25MiB", of the buffer in
    which small gradients travel together; 0 is none. units: patterns of names of the modules that are gathered as
    one; by default every block (a member of an nn.ModuleList or nn.Sequential), and each other module with parameters
    of its own. The pattern "" makes one unit, kept while the root's forward runs, of what no other unit holds. source:
    where shards get their values, by default from the module (equal on every rank).

    Parameters become DTensors, and so do their gradients: sums over ranks, never means, complete when backward returns.
    Make the optimizer afterwards. Linears that lie on a grid already are stored over the axes beside the grid's.

    Raises InputError where an axis or a level is unknown, or units match nothing.
    """
    sharding = _sharding(mesh_axes, level, keep, dtype, reduce_dtype, parse_bytes(bucket, "bucket"))
    axes = mesh_axes.mesh_dim_names or ()
    return lend(module, mesh_axes._get_root_mesh(), axes, lambda _: sharding, in_flight, units, source)


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, gradients of a module that ``shard`` stores, or of a parallelized model, are not reduced.

    Each backward adds them up, whole and in the stored element type, beside ``.grad``; the next one outside reduces
    all. For micro-batches but the last: fewer bytes travel, more are held. A sharded level holds whole gradients then.
    """
    schedule: Schedule = cast(Any, module).parameter_store.schedule
    return schedule.accumulate(LEVELS)


def lend(
    module: nn.Module,
    mesh: DeviceMesh,
    axes: tuple[str, ...],
    sharding_of: Callable[[str], Sharding],
    in_flight: int = 2,
    units: Sequence[str] | None = None,
    source: Source = from_values,
) -> nn.Module:
    """As ``shard``, each unit as ``sharding_of`` its name says. axes: those of ``mesh`` over which data are split."""
    names = _unit_names(module, units)
    store = ParameterStore(mesh, sharding_of, _unit_finder(names), in_flight)
    places = _place_all(module, store, axes, source, names)
    for name, inner in module.named_modules():
        unit = _innermost(names, name)
        below = [place for place in places if _holds(name, place.holder) and place.unit == unit]
        if below:
            _Lender(inner, store.schedule, below)

    def rest(*_: Any) -> None:
        if not torch.is_grad_enabled():
            store.schedule.rest()

    module.register_forward_hook(rest, always_call=True)
    cast(Any, module).parameter_store = store
    return module


def units_of(module: nn.Module) -> Callable[[str], str]:
    """Qualified parameter name → name of the unit that ``lend`` would put it in."""
    return _unit_finder(_unit_names(module, None))


def _unit_finder(names: Sequence[str]) -> Callable[[str], str]:
    def unit_of(parameter: str) -> str:
        holder = parameter.rpartition(".")[0]
        unit = _innermost(names, holder)
        return holder if unit is None else unit

    return unit_of


def _sharding(
    mesh: DeviceMesh,
    level: str | Mapping[str, str],
    keep: bool,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    bucket: int,
) -> Sharding:
    axes = mesh.mesh_dim_names or ()
    words = dict.fromkeys(axes, level) if isinstance(level, str) else dict(level)
    for axis in words:
        if axis not in axes:
            raise InputError(f"level: found axis {axis!r}; allowed: the mesh's axes ({', '.join(axes)})")
    split = tuple(axis for axis in axes if words.get(axis, "replicate") != "replicate")
    chosen = sorted({words[axis] for axis in split}) or ["replicate"]
    if len(chosen) > 1:
        raise InputError(f"level: found {' and '.join(chosen)}; allowed: one level beside 'replicate'")

    def name(kind: torch.dtype | None) -> str | None:
        return None if kind is None else str(kind).removeprefix("torch.")

    return Sharding(chosen[0], split, keep, name(dtype), name(reduce_dtype), bucket)


def _unit_names(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    modules = dict(module.named_modules())
    if patterns is None:
        chosen = [name for name in modules if _is_block(name, modules)]
    else:
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in modules):
                raise InputError(f"units: found no module for {pattern!r}; allowed: patterns of the module's own names")
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


def _innermost(units: Sequence[str], name: str) -> str | None:
    """The unit that the module of that name lies in, if any."""
    return max((unit for unit in units if _holds(unit, name)), key=len, default=None)


def _place_all(
    module: nn.Module, store: ParameterStore, axes: tuple[str, ...], source: Source, units: Sequence[str]
) -> list[Place]:
    """Stores every parameter; where plain modules use one."""
    own = [inner for inner in module.modules() if hasattr(inner, "stored_parameters")]
    found = {stored.parameter: stored for inner in own for stored in cast(Any, inner).stored_parameters()}
    moved = set[StoredParameter]()
    places: list[Place] = []
    for name, inner in module.named_modules():
        for key, parameter in list(inner._parameters.items()):
            if parameter is None:
                continue
            qualified = f"{name}.{key}" if name else key
            stored = found.get(parameter)
            if stored is None:
                if isinstance(parameter, DTensor):
                    raise InputError(
                        f"{qualified}: found a DTensor; allowed: plain parameters, and shardwright's layers"
                    )
                whole = [Replicate()] * store.mesh.ndim
                stored, _ = store.place(source, inner, key, qualified, whole, axes, qualified)
            elif inner in own and stored not in moved:
                store.take_over(stored, qualified)
            moved.add(stored)
            found[parameter] = stored
            inner._parameters[key] = stored.parameter
            if inner not in own:
                places.append(Place(name, inner, key, stored, _innermost(units, name) or ""))
    return places


@dataclass(frozen=True)
class Place:
    """Where a plain module uses a parameter: ``module.key``. unit: the name of the unit whose module that lies in."""

    holder: str
    module: nn.Module
    key: str
    stored: StoredParameter
    unit: str


class _Lender:
    """Lends the parameters below one module while its forward runs, those aside that are lent already.

    So a unit's module lends all, and what is inside lends only when it is called by itself: in a recomputation.
    """

    def __init__(self, module: nn.Module, schedule: Schedule, places: Sequence[Place]):
        self.places, self.schedule = places, schedule
        self._calls: list[_Call | None] = []
        module.register_forward_pre_hook(self._lend, with_kwargs=True)
        module.register_forward_hook(self._take_back, always_call=True)

    def _lend(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        places = [place for place in self.places if place.key not in place.module.__dict__]
        self._calls.append(None)
        if not places:
            return None
        self.schedule.begin_pass()
        call = self._calls[-1] = _Call(places)
        args, kwargs = call.watch(args, kwargs)
        for place in places:
            place.module.__dict__[place.key] = call.loan(place.stored)  # found before the module's own parameters
        return args, kwargs

    def _take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        if call is not None:
            call.close(output)


class _Call:
    """One forward of a unit's module, and its backward.

    The backward is over when every loan has its gradient; at the latest when the inputs have theirs, for then the
    parameters that have none were not used. Where nothing tells, the end of backward does.
    """

    def __init__(self, places: Sequence[Place]):
        self.places = places
        self.units = list(dict.fromkeys(place.stored.unit for place in places))
        self._expected: list[tuple[Unit, StoredParameter | None]] = []  # whose gradients are to come; None: the inputs'
        self._uses: dict[int, Use] = {}
        self._begun = False
        self._replay = torch._C._current_graph_task_id() != -1  # inside a backward
        self._wanted = torch.is_grad_enabled() and not self._replay
        for unit in self.units:
            unit.open += 1

    def watch(self, args: Any, kwargs: Any) -> Any:
        """The inputs, such that we hear when they have their gradients."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._wanted and places:
            for place, tensor in zip(places, _Inputs.apply(self, *(leaves[i] for i in places)), strict=True):
                leaves[place] = tensor
            for unit in self.units:
                self._expect(unit)
        return tree_unflatten(leaves, spec)

    def loan(self, stored: StoredParameter) -> torch.Tensor:
        """The gathered W as a plain tensor, a leaf of the graph; its gradient is deposited in the store."""
        loan = stored.lease()
        if stored.parameter.requires_grad and torch.is_grad_enabled():
            number = self._expect(stored.unit, stored)
            loan = loan.detach().requires_grad_()
            loan.register_post_accumulate_grad_hook(partial(self._deposit, stored, number))
        return loan

    def _expect(self, unit: Unit, stored: StoredParameter | None = None) -> int:
        """Announces a gradient to come, of a loan or of the inputs; the number by which it is heard of."""
        number = len(self._expected)
        self._expected.append((unit, stored))
        if self._wanted:
            self._uses[number] = unit.announce(stored)
        return number

    def close(self, output: Any) -> None:
        """The forward is over."""
        for place in self.places:
            place.module.__dict__.pop(place.key, None)
        for unit in self.units:
            unit.open -= 1
        if torch.is_grad_enabled():
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        """A gradient has reached an output: W will be read."""
        if self._replay:
            raise RuntimeError(
                f"{self.units[0].name}: found a backward inside a backward, as of a checkpoint with "
                "use_reentrant=True; allowed: use_reentrant=False"
            )
        if self._begun or not self._expected:
            return
        self._begun = True
        for number, (unit, stored) in enumerate(self._expected):
            if number not in self._uses:  # a second backward through a graph that was retained
                self._uses[number] = unit.announce(stored)
        for unit in self.units:
            unit.busy += 1
            if unit.gathers:
                unit.schedule.ask(unit, again=True)

    def _deposit(self, stored: StoredParameter, number: int, loan: torch.Tensor) -> None:
        gradient, loan.grad = loan.grad, None
        assert gradient is not None
        if gradient.requires_grad:
            raise RuntimeError(f"{stored.name}: found create_graph=True; allowed: gradients of first order")
        stored.deposit(gradient, _is_alone(gradient))
        use = self._uses.pop(number, None)
        if use is not None:
            stored.unit.done(stored, use, read=_holders(loan) > 3)  # beside the loan, the store, and Python's object
        if not self._uses:
            self.end()

    def end(self) -> None:
        """Nothing of this call is to come any more."""
        for number, use in self._uses.items():
            self._expected[number][0].uses.discard(use)
        self._uses.clear()
        for unit in self.units:
            if self._begun:
                unit.busy = max(0, unit.busy - 1)
            if not unit.uses:
                unit.complete()
        self._begun = False


class _Inputs(torch.autograd.Function):
    """The inputs as they are, which tell when they have their gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.call.end()
        return (None, *grads)


def _is_alone(gradient: torch.Tensor) -> bool:
    """Whether nobody else reads the memory of what the engine has just left in ``.grad``.

    Where the engine did not copy, three hold the storage: its own tensor, ``.grad``, and the Python object here.
    """
    return gradient.untyped_storage().nbytes() == gradient.nbytes and _holders(gradient) <= 3


def _holders(tensor: torch.Tensor) -> int:
    """How many hold the tensor's storage: tensors, those that a graph has saved, and one for the look at it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
