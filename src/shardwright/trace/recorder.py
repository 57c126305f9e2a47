"""The recorder: one dispatch mode that watches a step, on real tensors or on fake ones.

What makes the two records equal: storages are told apart by weak reference, never by address; an alias costs nothing;
fake-mode bookkeeping operators are left out; Python's cycle collector, whose timing depends on how many objects exist,
rests while a recorder is active.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardwright.trace.events import CATEGORIES, Alloc, Event, Free, Mark, Op, Storage

_BOOKKEEPING = ("prim", "profiler")  # questions about fake tensors, and labels for profilers: no work is done
_DEVICE = torch.ops.prim.device.default
"""C++ asks a fake tensor for its device more often than it does anything else."""

_LIFT = torch.ops.aten.lift_fresh.default
"""Takes in a tensor that was made of numbers."""

_RANK_OF = {category: rank for rank, category in enumerate(CATEGORIES)}


class _Owner:
    """A living (or once living) storage, while the recorder runs."""

    __slots__ = ("alive", "bytes", "category", "key", "module", "number", "op", "reference")

    def __init__(self, number: int, size: int, category: str, module: str, op: str, key: int):
        self.number, self.bytes, self.category = number, size, category
        self.module, self.op, self.key = module, op, key
        self.alive = True
        self.reference: Any = None

    def note(self, category: str) -> None:
        if _RANK_OF[category] < _RANK_OF[self.category]:
            self.category = category


class Observer(Protocol):
    """Is told of every operator that a recorder writes down, before it runs."""

    def operator(self, name: str, storages: list[int]) -> None:
        """name: as torch has it, such as ``c10d.allreduce_.default``; storages: those of its arguments, as places in
        ``Trace.storages``, one for each tensor.
        """


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that owns bytes on this rank: a DTensor's local part, what a tensor that is still on its way will
    hold, any other tensor itself.
    """
    return _arrived(getattr(tensor, "_local_tensor", tensor))


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """torch wraps what a collective is to bring; the wrapper's storage is none."""
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


class Recorder(TorchDispatchMode):
    """Appends to ``events`` what happens while it is active. Use ``record``, which installs its hooks."""

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self._observer = observer
        self.events: list[Event] = []
        self.saved: list[int] = []
        self.step = 1
        self.phase = "forward"
        self._owners: list[_Owner] = []
        self._living: dict[int, _Owner] = {}
        self._packed: list[tuple[weakref.ref[torch.Tensor], _Owner]] = []
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._borders: list[tuple[int, str]] = []
        self._op_names: dict[Any, str] = {}
        self._fake = False
        self._quiet = 0
        self.unlogged = 0
        self._in_loss = self._in_optimizer = self._step_over = False

    # -- what is alive ------------------------------------------------------------------------------------------------

    def adopt(self, root: Any) -> None:
        """Takes in what a module, an optimizer or a tensor owns at the start."""
        if isinstance(root, torch.nn.Module):
            for name, module in root.named_modules():
                self._names.setdefault(id(module), name or type(module).__name__)
            for name, parameter in root.named_parameters():
                self._own(plain(parameter), "parameter", name, "")
                if parameter.grad is not None:
                    self._own(plain(parameter.grad), "gradient", name, "")
            for name, buffer in root.named_buffers():
                self._own(plain(buffer), "buffer", name, "")
        elif isinstance(root, torch.optim.Optimizer):
            self._adopt_state(root)
        elif isinstance(root, torch.Tensor):
            self._own(plain(root), "input", "", "")
        else:
            raise TypeError(f"record: found a {type(root).__name__}; allowed: modules, optimizers and tensors")

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._own(plain(value), "optimizer", "", "").note("optimizer")

    def _own(self, tensor: torch.Tensor, category: str, module: str, op: str) -> _Owner:
        storage = tensor.untyped_storage()
        key = id(storage)
        owner = self._living.get(key)
        if owner is not None:
            return owner
        owner = _Owner(len(self._owners), storage.nbytes(), category, module, op, key)
        # The callback holds the owner and the recorder weakly enough: both die with the recording.
        owner.reference = weakref.ref(storage, lambda _: self._died(owner))
        self._owners.append(owner)
        self._living[key] = owner
        self.events.append(Alloc(self.step, self.phase, owner.number))
        return owner

    def _died(self, owner: _Owner) -> None:
        if self._living.get(owner.key) is owner:
            del self._living[owner.key]
            if owner.alive:
                owner.alive = False
                self.events.append(Free(self.step, self.phase, owner.number))

    def released(self, tensor: torch.Tensor) -> None:
        """The arena took the tensor's memory back, whoever may still hold the Python object."""
        owner = self._living.get(id(tensor.untyped_storage()))
        if owner is not None and owner.alive:
            owner.alive = False
            self.events.append(Free(self.step, self.phase, owner.number))

    def renewed(self, tensor: torch.Tensor, category: str) -> None:
        """A storage whose memory was released has memory again: a new entry of the ledger."""
        self.arrive()
        self._living.pop(id(tensor.untyped_storage()), None)
        self._own(plain(tensor), category, self.module(), "")

    def note(self, tensor: torch.Tensor, category: str) -> None:
        """``category`` applies to the tensor's storage, from its birth on."""
        self._own(plain(tensor), "temporary", self.module(), "").note(category)

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The place of the tensor's storage in ``Trace.storages``."""
        return self._own(plain(tensor), "temporary", self.module(), "").number

    # -- where we are -------------------------------------------------------------------------------------------------

    def module(self) -> str:
        """The module at work: the innermost one called; in backward, the one whose forward made the node."""
        if self._stack:
            return self._stack[-1]
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            if node is not None:
                place = bisect.bisect_right(self._borders, (node._sequence_nr(), "\U0010ffff")) - 1
                return self._borders[place][1] if place >= 0 else ""
        return ""

    def arrive(self) -> None:
        """Notices a change of phase, before anything is written down."""
        if torch._C._current_graph_task_id() != -1:
            phase = "backward"
        elif self._in_optimizer:
            phase = "step"
        else:
            phase = "loss" if self._in_loss else "forward"
        if self._step_over and phase != "step":
            self._mark("done")
            self._step_over = False
            self.step += 1
            self.phase = phase
            self._mark("start")
        if phase == self.phase:
            return
        if self.phase == "forward" and phase in ("loss", "backward"):
            self._mark("after forward")
        if phase == "backward":
            self._mark("after loss")
            self._in_loss = False
            self._settle_saved()
        if self.phase == "backward":
            self._mark("after backward")
        self.phase = phase

    def _mark(self, point: str) -> None:
        self.events.append(Mark(self.step, self.phase, point))

    def _settle_saved(self) -> None:
        """What a pack hook has seen and the graph still holds, when backward starts, is saved."""
        self._packed = [(reference, owner) for reference, owner in self._packed if reference() is not None]
        owners = [owner for _, owner in self._packed if owner.alive]  # memory that the arena took back is not held
        held = {owner.number: owner for owner in owners if owner.category not in ("parameter", "buffer")}
        for owner in held.values():
            owner.note("saved")
        self.saved.append(sum(owner.bytes for owner in held.values()))

    # -- hooks --------------------------------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if not self._stack and torch._C._current_graph_task_id() == -1:
            self._in_loss = False
        self._stack.append(self._names.get(id(module)) or type(module).__name__)
        self._border()

    def leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._border()

    def _border(self) -> None:
        self._borders.append((torch._C._autograd._get_sequence_nr(), self._stack[-1] if self._stack else ""))

    def before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer, self._step_over = True, False
        self.arrive()

    def after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._adopt_state(optimizer)
        self._mark("after step")
        self._in_optimizer, self._step_over = False, True

    def accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # the store may still be reducing it
            self.note(parameter.grad, "gradient")

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = self._own(plain(tensor), "input", "", "")
        with self.quietly():
            alias = tensor.detach()
        self._packed.append((weakref.ref(alias), owner))
        return alias

    def begin(self, roots: tuple[Any, ...]) -> None:
        modes = _get_current_dispatch_mode_stack()
        self._fake = any(isinstance(mode, FakeTensorMode) for mode in modes)
        for root in roots:
            self.adopt(root)
        self._mark("start")

    def end(self) -> None:
        if self._step_over:
            self._mark("done")
        else:
            if self.phase == "backward":
                self._mark("after backward")
            elif self.phase in ("forward", "loss"):
                self._mark("after forward" if self.phase == "forward" else "after loss")
                self._settle_saved()
            self._mark("done")

    def storages(self) -> list[Storage]:
        return [Storage(owner.bytes, owner.category, owner.module, owner.op) for owner in self._owners]

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Operators inside are not written down."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # -- every operator -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        kwargs = kwargs or {}
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a DTensor: let it unwrap, and see the operators on its local parts
            if kind is FakeTensor and not self._fake:
                return func(*args, **kwargs)  # shape propagation inside a real run
        if self._quiet or func.namespace in _BOOKKEEPING:
            return func(*args, **kwargs)
        self.arrive()
        module = self.module()
        name = self._op_names.get(func)
        if name is None:
            name = self._op_names[func] = str(func)
        if func is _LIFT and self._fake and not isinstance(args[0], FakeTensor):
            # A constant of the program. A fake one takes the place of the real one, which is seen by nobody else.
            result = func(*args, **kwargs)
            self._own(result, "input", module, "")
            self.events.append(Op(self.step, self.phase, module, name, (tuple(args[0].shape),)))
            return result
        shapes: list[tuple[int, ...]] = []
        numbers: list[int] = []
        for tensor in (*_tensors(args), *_tensors(tuple(kwargs.values()))):
            shapes.append(tuple(tensor.shape))
            numbers.append(self._own(tensor, "input", module, "").number)
        if self._observer is not None:
            self._observer.operator(name, numbers)
        self.events.append(Op(self.step, self.phase, module, name, tuple(shapes)))
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._own(_arrived(tensor), "temporary", module, name)
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or not value.is_meta:  # a tensor on the meta device owns no bytes
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
