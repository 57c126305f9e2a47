"""What one operation of the emulated NCCL reads, sends, and makes of what arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

Copies = Mapping[int, torch.Tensor]
"""id of an input → what it held when it was read."""


class BrokenRule(AssertionError):
    """A program that NCCL would run wrongly, or for ever."""


def raw(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors, one after the other."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Operation:
    """text: what all members must issue alike. outgoing(copies, peer): what a peer gets. expects(peer): how many
    elements come from it. land(copies, arrived): writes the outputs. fault: why NCCL would refuse it, else empty.
    """

    text: str
    dtype: torch.dtype
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    outgoing: Callable[[Copies, int], list[torch.Tensor]]
    expects: Callable[[int], int]
    land: Callable[[Copies, Mapping[int, torch.Tensor]], None]
    fault: str = ""

    def check(self, launch: Any) -> None:
        """Raises BrokenRule for tensors with gaps, of several element types, or of sizes that do not fit."""
        fault = self.fault
        for tensor in (*self.inputs, *self.outputs):
            if not tensor.is_contiguous():
                fault = f"a tensor with gaps, sizes {tuple(tensor.shape)}, strides {tensor.stride()}"
            elif tensor.dtype != self.dtype:
                fault = f"{tensor.dtype} beside {self.dtype}"
        if fault:
            raise BrokenRule(
                f"{launch.label}: rank {launch.group.ranks[launch.group.me]} issues {self.text} on {fault}"
            )

    # -- the kinds -----------------------------------------------------------------------------------------------------

    @staticmethod
    def all_reduce(group: Any, tensor: torch.Tensor, opts: Any) -> Operation:
        def land(copies: Copies, arrived: Mapping[int, torch.Tensor]) -> None:
            _write(tensor, _reduced(group, copies[id(tensor)], arrived, opts))

        return Operation(
            _text(f"all_reduce ({_op(opts)})", [tensor]), tensor.dtype, [tensor], [tensor],
            lambda copies, _: [copies[id(tensor)]], lambda _: tensor.numel(), land,
        )  # fmt: skip

    @staticmethod
    def all_gather(group: Any, part: torch.Tensor, places: Sequence[torch.Tensor]) -> Operation:
        own = places[group.me].numel()
        return _gather(group, part, places, _text("all_gather of parts", places), own)

    @staticmethod
    def all_gather_single(group: Any, part: torch.Tensor, whole: torch.Tensor) -> Operation:
        fits = whole.numel() == group.n * part.numel()
        places = _cut(whole, group.n) if fits and whole.is_contiguous() else [whole]
        own = part.numel() if fits else -1
        return _gather(group, part, places, _text("all_gather", [part]), own)

    @staticmethod
    def reduce_scatter(group: Any, wholes: Sequence[torch.Tensor], part: torch.Tensor, opts: Any) -> Operation:
        text = _text(f"reduce_scatter of parts ({_op(opts)})", wholes)
        return _scatter(group, wholes, part, text, opts, wholes[group.me].numel())

    @staticmethod
    def reduce_scatter_single(group: Any, whole: torch.Tensor, part: torch.Tensor, opts: Any) -> Operation:
        fits = whole.numel() == group.n * part.numel()
        wholes = _cut(whole, group.n) if fits and whole.is_contiguous() else [whole]
        text = _text(f"reduce_scatter ({_op(opts)})", [whole])
        return _scatter(group, wholes, part, text, opts, part.numel() if fits else -1)

    @staticmethod
    def broadcast(group: Any, tensor: torch.Tensor, root: int) -> Operation:
        mine = group.me == root

        def land(_: Copies, arrived: Mapping[int, torch.Tensor]) -> None:
            if not mine:
                _write(tensor, arrived[root])

        return Operation(
            _text(f"broadcast from rank {group.ranks[root]}", [tensor]), tensor.dtype,
            [tensor] if mine else [], [] if mine else [tensor],
            lambda copies, _: [copies[id(tensor)]] if mine else [],
            lambda peer: tensor.numel() if peer == root else 0, land,
        )  # fmt: skip

    @staticmethod
    def all_to_all(
        group: Any, whole: torch.Tensor, output: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Operation:
        """Cut along dimension 0, evenly where no sizes are told. Sizes may differ between members."""
        sent = list(sent) or [whole.shape[0] // group.n] * group.n
        received = list(received) or [output.shape[0] // group.n] * group.n
        places = output.split(received)

        def land(copies: Copies, arrived: Mapping[int, torch.Tensor]) -> None:
            for peer, place in enumerate(places):
                own = copies[id(whole)].split(sent)[peer]
                _write(place, own if peer == group.me else arrived[peer])

        return Operation(
            f"all_to_all of {whole.dtype}", whole.dtype, [whole], [output],
            lambda copies, peer: [copies[id(whole)].split(sent)[peer]], lambda peer: places[peer].numel(), land,
        )  # fmt: skip

    @staticmethod
    def barrier(group: Any) -> Operation:
        return Operation("barrier", torch.uint8, [], [], lambda *_: [], lambda _: 0, lambda *_: None)

    @staticmethod
    def send(tensor: torch.Tensor, peer: int) -> Operation:
        return Operation(
            _text("a message", [tensor]), tensor.dtype, [tensor], [],
            lambda copies, _: [copies[id(tensor)]], lambda _: 0, lambda *_: None,
        )  # fmt: skip

    @staticmethod
    def receive(tensor: torch.Tensor, peer: int) -> Operation:
        return Operation(
            _text("a message", [tensor]), tensor.dtype, [], [tensor],
            lambda *_: [], lambda _: tensor.numel(), lambda _, arrived: _write(tensor, arrived[peer]),
        )  # fmt: skip


def _gather(group: Any, part: torch.Tensor, places: Sequence[torch.Tensor], text: str, own: int) -> Operation:
    def land(copies: Copies, arrived: Mapping[int, torch.Tensor]) -> None:
        for peer, place in enumerate(places):
            _write(place, copies[id(part)] if peer == group.me else arrived[peer])

    return Operation(
        text, part.dtype, [part], list(places),
        lambda copies, _: [copies[id(part)]], lambda peer: places[peer].numel(), land,
        "" if own == part.numel() else f"a part of {part.numel()} elements for places of {_sizes(places)}",
    )  # fmt: skip


def _scatter(
    group: Any, wholes: Sequence[torch.Tensor], part: torch.Tensor, text: str, opts: Any, own: int
) -> Operation:
    def land(copies: Copies, arrived: Mapping[int, torch.Tensor]) -> None:
        _write(part, _reduced(group, copies[id(wholes[group.me])], arrived, opts))

    return Operation(
        text, part.dtype, list(wholes), [part],
        lambda copies, peer: [copies[id(wholes[peer])]], lambda _: part.numel(), land,
        "" if own == part.numel() else f"a part of {part.numel()} elements from {_sizes(wholes)}",
    )  # fmt: skip


def _cut(whole: torch.Tensor, n: int) -> list[torch.Tensor]:
    flat, each = whole.detach().view(-1), whole.numel() // n
    return [flat[peer * each : (peer + 1) * each] for peer in range(n)]


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data.copy_(value.view(tensor.shape))


def _reduced(group: Any, own: torch.Tensor, arrived: Mapping[int, torch.Tensor], opts: Any) -> torch.Tensor:
    """In rank order, rounded to the element type after each rank, as a ring of low precision does."""
    shares = [own.view(-1) if peer == group.me else arrived[peer] for peer in range(group.n)]
    op = _op(opts)
    combine = {"SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul}[op]
    total = reduce(combine, shares)
    return total / group.n if op == "AVG" else total


def _op(opts: Any) -> str:
    ops = dist.ReduceOp
    return next(name for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT") if opts.reduceOp == getattr(ops, name))


def _text(kind: str, tensors: Sequence[torch.Tensor]) -> str:
    return f"{kind} of {str(tensors[0].dtype).removeprefix('torch.')} [{_sizes(tensors)}]"


def _sizes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(tensor.numel()) for tensor in tensors)
