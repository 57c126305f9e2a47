"""Unsharded parameters in modules that know nothing of the store: hooks gather them while a group's module runs.

| when                       | what                                                                                |
|----------------------------|-------------------------------------------------------------------------------------|
| before the group's forward | gather; the module sees plain unsharded tensors, each a leaf of the graph           |
| after it                   | the module has its DTensors back; W is released when the next group is asked for    |
| backward reads W           | gather again (saved_weights.py); the module sees W until the backward has read it   |
| gradient reaches a leaf    | it is deposited; when the group's inputs have theirs, its backward is over          |
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright import trace
from shardwright.errors import InputError
from shardwright.params.parameter_group import ParameterGroup, Use
from shardwright.params.schedule import Schedule
from shardwright.params.shard import Version
from shardwright.params.stored import StoredParameter
from shardwright.params.written import fingerprint
from shardwright.unsharding.places import Place, ShownParameters
from shardwright.unsharding.saved_weights import Handle, SavedWeights


class UnshardHooks:
    """Unshards the parameters below one module while its forward runs, those aside that are unsharded already.

    So a group's module unshards all, and what is inside does only when it is called by itself: in a recomputation.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        saved: SavedWeights,
        places: Sequence[Place],
        shown: ShownParameters,
    ):
        self.places, self.schedule, self.saved, self.shown = places, schedule, saved, shown
        self._releases = any(place.stored.releases for place in places)
        self._calls: list[tuple[ModuleCall | None, bool]] = []
        module.register_forward_pre_hook(self._unshard, with_kwargs=True)
        module.register_forward_hook(self._reshard, always_call=True)

    def _unshard(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_compile(type(module).__name__)
        self.shown.hide()
        places = [place for place in self.places if place.key not in place.module.__dict__]
        call = None
        self._calls.append((None, False))
        if places:
            self.schedule.begin_call()
            call = ModuleCall(places, self.schedule, self.saved)
            self._calls[-1] = call, False
            args, kwargs = call.watch(args, kwargs)
            for place in places:
                # found before the module's own parameters
                place.module.__dict__[place.key] = call.unsharded(place.stored)
        if self._releases:
            self._calls[-1] = call, self.saved.push()
        return args, kwargs

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def _reshard(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._calls:  # refused before it began
            return
        call, pushed = self._calls.pop()
        if pushed:
            self.saved.pop()
        if call is not None:
            call.close(output)


def refuse_copy() -> NoReturn:
    """A copy of a sharded module would share its memory and its place among the ranks."""
    raise InputError("deepcopy: found a sharded module; allowed: a copy made before that, or of its state_dict()")


def refuse_compile(module: str) -> None:
    """torch.compile traces a module's hooks, which gather memory that it would take for constant.

    Where it gives a hook up, it runs the hook as it is, with an eye on what that calls.
    """
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        raise InputError(
            f"torch.compile: found sharded parameters in {module}; allowed: the model uncompiled, or "
            "modules in it without parameters compiled by themselves"
        )


class ModuleCall:
    """One forward of a group's module, and its backward.

    The backward is over when every unsharded parameter has its gradient; at the latest when the inputs have theirs, for
    then the parameters that have none were not used. Where nothing tells, the end of backward does.
    """

    def __init__(self, places: Sequence[Place], schedule: Schedule, saved: SavedWeights):
        self.places, self.schedule, self.saved = places, schedule, saved
        self.param_groups = list(dict.fromkeys(place.stored.param_group for place in places))
        # whose gradients are to come; None: the inputs'
        self._expected: list[tuple[ParameterGroup, StoredParameter | None]] = []
        self._versions: list[tuple[Version, int] | None] = []
        self._uses: dict[int, Use] = {}
        self._handles: dict[StoredParameter, weakref.WeakSet[Handle]] = {}
        self._entered = self._read = -1  # the backwards that this call has taken note of, and asked for W in
        self._busy = False
        self._wholes: dict[StoredParameter, torch.Tensor] = {}  # W: their memory comes and goes
        self._shown: list[Place] = []  # whose modules see W in a backward
        self._replay = torch._C._current_graph_task_id() != -1  # inside a backward
        self._wanted = torch.is_grad_enabled() and not self._replay
        for param_group in self.param_groups:
            param_group.open += 1

    def watch(self, args: Any, kwargs: Any) -> Any:
        """The inputs, such that we hear when they have their gradients."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._wanted and places:
            for place, tensor in zip(places, _Inputs.apply(self, *(leaves[i] for i in places)), strict=True):
                leaves[place] = tensor
            for param_group in self.param_groups:
                self._expect(param_group)
        return tree_unflatten(leaves, spec)

    def unsharded(self, stored: StoredParameter) -> torch.Tensor:
        """The gathered W as a plain tensor, a leaf of the graph; its gradient is deposited in the store."""
        whole = self._wholes[stored] = stored.lease()
        if stored.releases:
            self._watch(whole, stored)
        if stored.parameter.requires_grad and torch.is_grad_enabled():
            number = self._expect(stored.param_group, stored)
            whole = whole.detach().requires_grad_()
            whole.register_post_accumulate_grad_hook(partial(self._deposit, stored, number))
        return whole

    def _watch(self, whole: torch.Tensor, stored: StoredParameter) -> None:
        """From now on graphs that save something on the memory of W hold handles instead."""
        self.saved.watch(whole, stored, self, self._handles.setdefault(stored, weakref.WeakSet()))

    def _expect(self, param_group: ParameterGroup, stored: StoredParameter | None = None) -> int:
        """Announces a gradient to come, of a parameter or of the inputs; the number by which it is heard of."""
        number = len(self._expected)
        self._expected.append((param_group, stored))
        self._versions.append(None if stored is None else (stored.version, fingerprint(stored.local)))
        if self._wanted:
            self._uses[number] = self.schedule.announce(param_group, stored)
        return number

    def close(self, output: Any) -> None:
        """The forward is over."""
        for place in self.places:
            place.module.__dict__.pop(place.key, None)
            self.saved.unwatch(place.stored)
        for param_group in self.param_groups:
            param_group.open -= 1
        if torch.is_grad_enabled():
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._on_output)

    def _on_output(self, _: torch.Tensor) -> None:
        """A gradient has reached an output."""
        self.need_weights()

    def _enter(self) -> bool:
        """Takes note of the backward at work; whether this call still expects something of it."""
        task = torch._C._current_graph_task_id()
        if self._replay:
            raise RuntimeError(
                f"{self.param_groups[0].name}: found a backward inside a backward, as of a checkpoint with "
                "use_reentrant=True; allowed: use_reentrant=False"
            )
        if self._entered != task:
            self._entered = task
            for number, (param_group, stored) in enumerate(self._expected):
                if number not in self._uses:  # a second backward through a graph that was retained
                    self._uses[number] = self.schedule.announce(param_group, stored)
            self.schedule.begin_backward(task)
        return bool(self._uses)

    def need_weights(self) -> None:
        """W will be read by the backward at work: the first time, every group of the call is gathered."""
        if not self._enter() or self._read == self._entered:
            return
        self._read = self._entered
        for (_, stored), seen in zip(self._expected, self._versions, strict=True):
            if stored is not None and seen is not None:
                stored.check_unmodified(*seen)
        self._busy = True
        for param_group in self.param_groups:
            param_group.busy += 1
            if param_group.gathers:
                self.schedule.ask(param_group, again=True)
        self._show()

    def _show(self) -> None:
        """The modules see W while this backward is at work: a method that is replayed reads it outside of any call.

        What a replay makes of it is not differentiated: a checkpoint takes only what the replay would save.
        """
        for place in self.places:
            module = place.reference()
            if module is not None and place.key not in module.__dict__:
                whole = self._wholes[place.stored]
                if place.stored.releases:
                    self._watch(whole, place.stored)
                with trace.quiet():
                    module.__dict__[place.key] = whole.detach().requires_grad_(place.stored.trains)
                self._shown.append(place)
        if self._shown:
            engine: Any = Variable._execution_engine
            engine.queue_callback(_Hiding(self))

    def hide(self, stored: StoredParameter | None = None) -> None:
        """The modules have their DTensors again, or that of ``stored``."""
        for place in [place for place in self._shown if stored in (None, place.stored)]:
            self._shown.remove(place)
            module = place.reference()
            if module is not None:
                module.__dict__.pop(place.key, None)
            self.saved.unwatch(place.stored)

    def _deposit(self, stored: StoredParameter, number: int, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if gradient.requires_grad:
            raise RuntimeError(f"{stored.name}: found create_graph=True; allowed: gradients of first order")
        self._enter()
        stored.deposit(gradient, _is_alone(gradient))
        use = self._uses.pop(number, None)
        if use is None:
            return
        self.hide(stored)
        # beside the leaf, the store, and Python's object
        read = _holders(leaf) > 3 or bool(self._handles.get(stored))
        self.schedule.done(stored.param_group, stored, use, read)
        if not self._uses:
            self.end()

    def end(self) -> None:
        """Nothing of this call is to come any more."""
        for number, use in self._uses.items():
            self._expected[number][0].uses.discard(use)
        self._uses.clear()
        for param_group in self.param_groups:
            if self._busy:
                param_group.busy = max(0, param_group.busy - 1)
        self._busy = False
        self.hide()
        for param_group in self.param_groups:
            if not param_group.uses:
                self.schedule.reductions.complete(param_group)


class _Hiding:
    """Ends what a call shows when the backward ends: the engine calls it then, and drops it where an error has come."""

    def __init__(self, call: ModuleCall):
        self.call = call

    def __call__(self) -> None:
        self.call.hide()

    def __del__(self) -> None:
        self.call.hide()


class _Inputs(torch.autograd.Function):
    """The inputs as they are, which tell when they have their gradients."""

    @staticmethod
    def forward(ctx: Any, call: ModuleCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
