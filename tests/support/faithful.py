"""Runs an ill-behaved program (ill_behaved.py) on this rank: as plain torch would, and stored by ``sw.shard``.

The reference is a plain module on every rank whose gradients are added up over ranks, as
DistributedDataParallel(find_unused_parameters=True) does, times the ranks: of a parameter that no rank used there is
none. It writes down what a program can see; the stored run is compared with that, without a collective of its own.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.values.placement import cut
from support import dense
from support.ill_behaved import Program, Step
from support.ill_behaved_run import Different, Run

TOLERANCE = 1e-10
Seen = tuple[str, str, torch.Tensor | None]
"""(what, of what, its value on this rank, if it has one)."""


class Raised(Exception):
    """The reference raised there: so must the stored run."""


class Reference(Run):
    """Plain modules; ``seen`` is what the program saw."""

    def __init__(self, program: Program):
        self.seen: list[Seen] = []
        self._watched = set[nn.Parameter]()
        self._unreduced: dict[nn.Parameter, torch.Tensor] = {}
        super().__init__(program)

    def see(self, what: str, of: str, value: torch.Tensor | None) -> None:
        self.seen.append((what, of, None if value is None else value.clone()))

    def accumulated(self, parameter: nn.Parameter) -> None:
        self._watched.add(parameter)

    def discard(self) -> None:
        self._unreduced = {}

    def do_zero(self, step: Step) -> None:
        """As if gradients that are not reduced yet were in ``.grad``, as torch has them."""
        for parameter in self._unreduced if step["how"] == "zeros" else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().do_zero(step)
        self.discard()

    def _backward_that_fails(self, loss: torch.Tensor) -> None:
        grads = {parameter: parameter.grad for parameter in self.net.parameters()}
        try:
            loss.backward()
        finally:  # what an exception leaves counts for nothing: the program zeroes next
            for parameter, gradient in grads.items():
                parameter.grad = gradient

    def backward(self, loss: torch.Tensor, sync: bool) -> None:
        parameters = list(self.net.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        error: RuntimeError | None = None
        try:
            loss.backward()
        except RuntimeError as caught:
            error = caught
        for parameter, old in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                self._unreduced[parameter] = self._unreduced.get(parameter, 0) + parameter.grad
            parameter.grad = old
        if sync:
            self._reduce(parameters, error)
        elif error is not None:
            raise Raised(str(error))

    def _reduce(self, parameters: list[nn.Parameter], error: RuntimeError | None) -> None:
        """One sum over ranks of all that there is, of how many have it, and of whether one has failed."""
        own = [self._unreduced.get(parameter) for parameter in parameters]
        flat = [
            torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, own, strict=True)
        ]
        counts = torch.tensor([error is not None, *(gradient is not None for gradient in own)], dtype=torch.float64)
        total = torch.cat([counts, *flat])
        dist.all_reduce(total)
        if total[0]:
            raise Raised(str(error))
        sums = total[len(counts) :].split([parameter.numel() for parameter in parameters])
        for parameter, count, each in zip(parameters, total[1:], sums, strict=False):
            if count:
                gradient = each.view_as(parameter)
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        self._unreduced = {}
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        for parameter, count in zip(parameters, total[1:], strict=False):
            if count and parameter in self._watched:
                self.see("hook", names[parameter], parameter.grad)


class Stored(Run):
    """The module stored by ``sw.shard``; each thing seen is compared with ``expected``."""

    def __init__(self, program: Program, expected: list[Seen]):
        self._expected = deque(expected)
        self._called: dict[str, DTensor] = {}
        super().__init__(program)

    def store(self) -> None:
        program = self.program
        level: Any = "parameters" if program.level == "kept" else program.level
        if program.replicas > 1:
            mesh = dense.mesh_of(replica=program.replicas, shard=program.world // program.replicas)
            level = {"replica": "replicate", "shard": level}
        else:
            mesh = dense.mesh_of(data=program.world)
        self.model = sw.shard(
            self.net,
            mesh,
            level,
            keep=program.level == "kept",
            in_flight=program.in_flight,
            bucket=program.bucket,
            groups=("",) if program.root else None,
            unused=program.unused,
        )

    def accumulated(self, parameter: nn.Parameter) -> None:
        name = next(name for name, each in self.net.named_parameters() if each is parameter)

        def called(given: Any) -> None:
            if name in self._called:
                raise Different(f"the hook of {name} was called twice")
            self._called[name] = given.grad.clone()

        parameter.register_post_accumulate_grad_hook(called)

    def discard(self) -> None:
        sw.discard_accumulated(self.model)

    def backward(self, loss: torch.Tensor, sync: bool) -> None:
        self._called = {}
        with nullcontext() if sync else sw.no_sync(self.model):
            loss.backward()
        if sync:
            for name in [name for name, _ in self.net.named_parameters() if name in self._called]:
                self.see("hook", name, self._called.pop(name))

    def see(self, what: str, of: str, value: torch.Tensor | None) -> None:
        if not self._expected:
            raise Different(f"{what} of {of} where the reference has ended")
        expected_what, expected_of, expected = self._expected.popleft()
        if (what, of) != (expected_what, expected_of):
            raise Different(f"{what} of {of} where the reference has {expected_what} of {expected_of}")
        if (value is None) != (expected is None):
            raise Different(f"{what} of {of} is {'none' if value is None else 'there'}, and should not be")
        if value is None or expected is None:
            return
        if isinstance(value, DTensor):
            expected = cut(expected, value.device_mesh, value.placements)
            value = value.to_local()
        if value.shape != expected.shape:
            raise Different(f"{what} of {of} has the shape {list(value.shape)}, not {list(expected.shape)}")
        error = dense.error(value, expected) / max(1.0, float(expected.abs().max())) if value.numel() else 0.0
        if not error <= TOLERANCE:
            raise Different(f"{what} of {of} is off by {error:.3g}")

    @property
    def saw_all(self) -> bool:
        """Whether everything that the reference has was seen."""
        return not self._expected


def run(program: Program) -> str:
    """Runs the reference, then the stored program: "trained", or "raised" where both raise at the same place."""
    reference, raised = Reference(program), False
    try:
        reference.run()
    except Raised:
        raised = True
    stored = Stored(program, reference.seen)
    try:
        stored.run()
    except RuntimeError:
        if raised and stored.saw_all:
            return "raised"
        raise
    if raised:
        raise Different("no error where plain torch raises")
    if not stored.saw_all:
        raise Different("less was seen than the reference has")
    return "trained"
