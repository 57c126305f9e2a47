"""One run of an ill-behaved program on this rank: its steps, whatever its module is stored by."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from support.ill_behaved import Program, Step
from support.ill_behaved_net import WIDTH, Net, Planned


class Different(AssertionError):
    """Something that the program sees is not what the reference has."""


class Run:
    """One run of a program: the steps, whatever the module is stored by."""

    def __init__(self, program: Program):
        self.program = program
        self.rank = dist.get_rank()
        self.net = Net(program.shape, program.seed).double()
        self.model: nn.Module = self.net
        self.pending: list[torch.Tensor] = []
        self._hang("before")
        self.store()
        self._hang("after")
        self.optimizer = self._make_optimizer()

    # -- what differs

    def store(self) -> None:
        """Shards the module, where this run does."""

    def see(self, what: str, of: str, value: torch.Tensor | None) -> None:
        """The program sees a value."""

    def backward(self, loss: torch.Tensor, sync: bool) -> None:
        """One backward."""

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Registers a post-accumulate hook that lets the gradient be seen."""

    def discard(self) -> None:
        """Forgets gradients that were accumulated without synchronisation."""

    # -- hooks

    def _hang(self, when: str) -> None:
        for number, hook in enumerate(self.program.hooks):
            if hook["before"] == (when == "before"):
                self._register(hook["kind"], hook["on"], 0.5 + 0.25 * number)

    def _register(self, kind: str, on: str, factor: float) -> None:
        if kind in ("parameter", "accumulated"):
            parameter = self.net.get_parameter(on)
            if kind == "accumulated":
                self.accumulated(parameter)
            else:
                parameter.register_hook(lambda gradient: gradient * factor)
            return
        module = self.net.get_submodule(on)
        if kind == "forward":
            module.register_forward_hook(lambda _, args, output: output * factor)
        elif kind == "forward pre":
            module.register_forward_pre_hook(lambda _, args: (args[0] * factor,))
        else:
            module.register_full_backward_hook(
                lambda _, entering, leaving: tuple(None if each is None else each * factor for each in entering)
            )

    # -- steps

    def run(self) -> None:
        """All steps."""
        for step in self.program.steps:
            getattr(self, "do_" + step["do"])(step)

    def _forward(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, loss) of this rank's data."""
        generator = torch.Generator().manual_seed(step["data"] + self.rank)
        x, up = (torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        choice = {**step["choices"][self.rank], "fail": step.get("fail")}
        out = self.model(x.requires_grad_(self.program.inputs_train and torch.is_grad_enabled()), choice)
        y, side = self.net.parts_of(out)
        return y, (y * up).sum() + 0.3 * side

    def do_forward(self, step: Step) -> None:
        if step.get("absent") == self.rank:
            return
        y, loss = self._forward(step)
        self.see("output", "", y.detach())
        self.pending.append(loss)

    def do_evaluate(self, step: Step) -> None:
        with getattr(torch, step["mode"])():
            self.see("output", "", self._forward(step)[0].clone())

    def do_raise(self, step: Step) -> None:
        try:
            self._backward_that_fails(self._forward(step)[1])
        except Planned:
            self.pending = []
            return
        raise Different("an exception of the program was swallowed")

    def _backward_that_fails(self, loss: torch.Tensor) -> None:
        loss.backward()

    def do_backward(self, step: Step) -> None:
        """A rank that has nothing pending is absent; only without synchronisation may it be."""
        losses, self.pending = self.pending, []
        if not losses:
            return
        if step["how"] == "sum":
            self.backward(torch.stack(losses).sum(), step["sync"])
        for loss in losses[:: -1 if step["how"] == "reverse" else 1] if step["how"] != "sum" else ():
            self.backward(loss, step["sync"])
        if step["sync"]:
            for name, parameter in self.net.named_parameters():
                self.see("gradient", name, parameter.grad)

    def do_step(self, step: Step) -> None:
        self.optimizer.step()
        for name, parameter in self.net.named_parameters():
            self.see("parameter", name, parameter.detach())

    def do_zero(self, step: Step) -> None:
        if step["how"] == "loop":
            for parameter in self.net.parameters():
                parameter.grad = None
        elif step["how"] == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        elif step["how"] == "optimizer":
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        if step["how"] == "discard":
            self.discard()

    def do_freeze(self, step: Step) -> None:
        for name, parameter in self.net.named_parameters():
            if name == step["what"] or name.startswith(step["what"] + "."):
                parameter.requires_grad_(step["train"])

    def do_swap(self, step: Step) -> None:
        by, parameters = step["by"], list(self.net.parameters())
        how = step["how"]
        with torch.no_grad():
            if how == "foreach":
                torch._foreach_mul_(parameters, by)
            elif how == "load_state_dict":
                self.model.load_state_dict({key: value * by for key, value in self.model.state_dict().items()})
            elif how == "state_dict api":
                state = {key: value * by for key, value in get_model_state_dict(self.model).items()}
                set_model_state_dict(self.model, state)
            for parameter in parameters:
                if how == "copy_":
                    parameter.copy_(parameter * by)
                elif how == "data.copy_":
                    parameter.data.copy_(parameter * by)
                elif how == "data.mul_":
                    parameter.data.mul_(by)

    def do_replace(self, step: Step) -> None:
        """A parameter is another tensor from now on; an optimizer is made anew, as a user must."""
        head = self.net.head
        if step["what"] == "attribute":
            head.weight = nn.Parameter(head.weight.detach() * step["by"])
        else:
            head.load_state_dict({"weight": head.weight.detach() * step["by"]}, assign=True)
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters, kind = list(self.net.parameters()), self.program.optimizer
        if kind.startswith("sgd"):
            return torch.optim.SGD(parameters, lr=0.03, momentum=0.9, foreach=True if "foreach" in kind else None)
        return torch.optim.AdamW(parameters, lr=0.05, fused=True if "fused" in kind else None)
