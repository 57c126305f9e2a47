"""The net of an ill-behaved program: blocks, experts, an adapter, shared weights, losses beside the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER = 5, 6  # nothing divides by 2, 3 and 4 at once
SIDES = ("", "attribute", "dataclass", "second output", "input as output")


class Planned(Exception):
    """Raised on purpose by a forward or a backward."""


@dataclass(frozen=True)
class Shape:
    """What the net is made of. tied: modules that share a weight. side: how a loss reaches the program beside the
    output. recompute: what is checkpointed. outside: a weight that the root reads outside of its module's call."""

    blocks: int = 2
    experts: int = 0
    adapter: bool = False
    tied: str = ""
    side: str = ""
    recompute: str = ""
    outside: bool = False


@dataclass
class Result:
    """An output that is no tensor and no tuple."""

    y: torch.Tensor
    side: torch.Tensor


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise Planned("in backward")


class Mlp(nn.Module):
    """With a scalar, and a parameter of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.scale, self.few = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.randn(2, INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x) * self.scale + self.few.sum(0)))


class Block(nn.Module):
    """A residual MLP; what it returns beside its rows is ``shape.side``'s."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.mlp, self.scale = Mlp(), nn.Parameter(torch.tensor(0.9))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def forward(self, x: torch.Tensor) -> Any:
        again = self.shape.recompute
        y = x + (checkpoint(self.mlp, x, use_reentrant=False) if again == "inside" else self.mlp(x))
        y = checkpoint(self._scaled, y, use_reentrant=False) if again == "method" else self._scaled(y)
        if not self.shape.side:
            return y
        if self.shape.side == "input as output":
            return y, x
        side = (y * self.scale).square().mean()
        if self.shape.side == "attribute":
            self.side = side
            return y
        return Result(y, side) if self.shape.side == "dataclass" else (y, side)


class Net(nn.Module):
    """Rows of features in; (rows of features, the side loss) out, in the form that ``shape.side`` says."""

    def __init__(self, shape: Shape, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(shape.experts))
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)) if shape.adapter else None
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if shape.tied == "stem and head":
            self.head.weight = self.stem.weight
        elif shape.tied == "blocks":
            self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight

    def _block(self, block: nn.Module, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        out = checkpoint(block, h, use_reentrant=False) if self.shape.recompute == "around" else block(h)
        if self.shape.side == "dataclass":
            return out.y, out.side
        if self.shape.side == "second output":
            return out
        if self.shape.side == "input as output":
            return out[0], out[1].square().mean()
        return out, block.side if self.shape.side == "attribute" else 0.0

    def forward(self, x: torch.Tensor, choice: dict[str, Any]) -> Any:
        h, total = self.stem(x), x.new_zeros(())
        for number, block in enumerate(self.blocks):
            if number not in choice.get("skip", ()):
                h, side = self._block(block, h)
                total = total + side
            if number == 0 and choice.get("fail") == "forward":
                raise Planned("in forward")
            if number == 0 and choice.get("fail") == "backward":
                h = _Fail.apply(h)
        for number in choice.get("experts", ()):
            h = h + torch.tanh(self.experts[number](h))
        if self.adapter is not None and choice.get("adapter", True):
            h = h + self.adapter(h)
        y = self.head(h)
        if self.shape.outside:
            weight = self.stem.weight
            y = y + h @ getattr(weight, "full_tensor", lambda: weight)()
        if self.shape.side == "attribute":
            self.side = total
            return y
        return Result(y, total) if self.shape.side == "dataclass" else (y, total)

    def parts_of(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(the rows, the side loss) of what a forward returned."""
        if isinstance(out, torch.Tensor):
            return out, self.side
        return (out.y, out.side) if isinstance(out, Result) else out
