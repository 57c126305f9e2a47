"""One training step: count targets, forward, loss, backward for each micro-batch; then fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright import trace
from shardwright.comm.collectives import all_reduce
from shardwright.errors import InputError
from shardwright.files.messages import found_text
from shardwright.params.reductions import Reductions
from shardwright.spec.mesh import chunk
from shardwright.spec.plan import Plan
from shardwright.step.clipping import clip_grad_norm_
from shardwright.values.placement import local_of, wrap


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, called on the local parts of DTensor parameters; its state is DTensors too.

    The update is elementwise, so every layout computes the same one. No copy of the parameters is made.
    max_grad_norm: a step first scales all gradients so that their 2-norm, over the whole mesh, is at most this.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ):
        self.max_grad_norm = max_grad_norm
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_grad_norm is not None:
            clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.max_grad_norm)
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not held:
                continue
            _check_summed(held)
            states = [self._state_of(parameter) for parameter in held]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [local_of(parameter) for parameter in held],
                [local_of(cast(torch.Tensor, parameter.grad)) for parameter in held],
                [local_of(state["exp_avg"]) for state in states],
                [local_of(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return loss

    def _state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            local = local_of(parameter)
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
            for name in ("exp_avg", "exp_avg_sq"):
                moment = torch.zeros_like(local)
                if isinstance(parameter, DTensor):
                    moment = wrap(moment, parameter.shape, parameter.device_mesh, parameter.placements)
                state[name] = moment
        return state


def _check_summed(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            raise RuntimeError(
                "step: found gradients that are accumulated unreduced; allowed: a step after a backward outside no_sync"
            )


class TrainStep:
    """One step of a parallelized model, and its optimizer.

    Every rank differentiates the sum of its losses over the global count of targets, so gradients are sums of shares
    and need no averaging, whatever the layout and the number of micro-batches.

    model: what ``parallelize`` returned. mesh, plan: those that it was given; InputError for others. accumulation:
    micro-batches that a step must have, the plan's; None: any number.
    """

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        plan: Plan,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float | None = None,
    ):
        _check_given(model, mesh, plan)
        self.model = model
        self.accumulation: int | None = plan.accumulation
        data = model.loss_function.over_vocabulary.tokens
        first, end = chunk(plan.micro_batch, data.size, data.index)
        self.shape = (end - first, plan.sequence)
        self.loss = model.loss_function.over_vocabulary
        self.reductions: Reductions = model.parameter_store.schedule.reductions
        self.optimizer = FusedAdamW(
            model.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )

    def __call__(self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Runs the step on [(input_ids [B,S], next-token labels [B,S])], this data rank's rows.

        Returns the mean loss over all targets of the mesh, 0-dim, the same on every rank. B is the plan's batch over
        the data axes' size. Raises InputError where their number or a shape is not the plan's.
        """
        if self.accumulation is not None and len(micro_batches) != self.accumulation:
            raise InputError(
                f"step: found {len(micro_batches)} micro-batches; allowed: {self.accumulation}, the plan's accumulation"
            )
        self._check_shapes(micro_batches)
        self.reductions.discard_accumulated()  # of a step that ended in an error
        count = self.loss.count_targets(*(labels for _, labels in micro_batches))
        shares: list[torch.Tensor] = []
        total: torch.Tensor = count
        for ids, labels in micro_batches:
            loss = self.model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=count).loss
            with trace.span("loss"):
                shares.append(loss.detach())
                if len(shares) == len(micro_batches):
                    total = torch.stack(shares).sum()
                    all_reduce(total, self.loss.shares, "loss")
            # What is reduced once a step waits for the last micro-batch.
            with nullcontext() if len(shares) == len(micro_batches) else self.reductions.accumulate():
                loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _check_shapes(self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for number, batch in enumerate(micro_batches):
            for name, tensor in zip(("input_ids", "labels"), batch, strict=True):
                if tuple(tensor.shape) != self.shape:
                    raise InputError(
                        f"{name}: found {list(tensor.shape)} in micro-batch {number}; allowed: {list(self.shape)}, "
                        "this rank's sequences of the plan's batch, and its tokens of a sequence"
                    )

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The mean loss over all targets of ``micro_batches`` (as in a step), without gradients; 0-dim, on every rank.

        The model is put into evaluation mode for it, and back into the mode that it was in.
        """
        self._check_shapes(micro_batches)
        training = self.model.training
        self.model.eval()
        count = self.loss.count_targets(*(labels for _, labels in micro_batches))
        shares = [
            self.model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=count).loss
            for ids, labels in micro_batches
        ]
        with trace.span("loss"):
            total = torch.stack(shares).sum()
            all_reduce(total, self.loss.shares, "loss")
        self.model.train(training)
        return total


def _check_given(model: Any, mesh: DeviceMesh, plan: Plan) -> None:
    """Raises InputError unless these are the mesh and the plan that ``parallelize`` was given."""
    given = getattr(model, "parallelized", None)
    if given is None:
        raise InputError("model: found one that lies on no mesh; allowed: a model that sw.parallelize returned")
    if given.mesh != mesh:
        raise InputError(f"mesh: found {mesh}; allowed: {given.mesh}, which the model lies on")
    other = plan.differs_from(given.plan)
    if other is not None:
        found, own = (found_text(getattr(each, other)) for each in (plan, given.plan))
        raise InputError(
            f"plan: found another {other} ({found}) than that of the model ({own}); allowed: the plan that parallelize "
            "was given"
        )


def record_steps(
    step: TrainStep, batches: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
) -> tuple[list[torch.Tensor], trace.Trace]:
    """Runs one step for each of ``batches`` under the recorder: (the losses, the trace).

    Rehearsals and real runs both record through here, so that what is alive around the step is the same.
    """
    with trace.record(step.model, step.optimizer) as recorded:
        losses = [step(micro_batches) for micro_batches in batches]
    return losses, recorded


def record_evaluation(
    step: TrainStep, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, trace.Trace]:
    """One evaluation under the recorder: (the mean loss, the trace)."""
    with trace.record(step.model, step.optimizer) as recorded:
        loss = step.evaluate(micro_batches)
    return loss, recorded


def record_initialisation(build: Callable[[], Any]) -> tuple[Any, trace.Trace]:
    """The making of a model under the recorder: (what ``build`` returns, the trace)."""
    with trace.record() as recorded:
        model = build()
    return model, recorded
