"""Dropout whose mask is a function of places in the whole tensor, so every layout drops the same elements.

| pass     | in        | out                                              |
|----------|-----------|--------------------------------------------------|
| forward  | x [..,h]  | y = x · mask / (1 − p); keeps the call's number  |
| backward | dy [..,h] | dx = dy · mask / (1 − p), the mask computed anew |

mask[row, column] depends on the layer's key, the number of the call, the token's row and the feature's column, both in
the whole tensor: equal where a tensor is replicated, different where it is split, whatever the layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.values.random import CHUNK, fold, hashed

Place = Callable[[torch.Tensor], tuple[int, int, int]]
"""A local input → (first row, first column, columns of the whole); its leading dimensions together are the rows."""

REMEMBERED = 1024
"""Training calls of one layer whose backward may be outstanding at once."""


class GridDropout(nn.Module):
    """Dropout with probability ``p`` on this rank's part [.., h_local] of a tensor, at least two dimensions.

    key: of the layer, from ``params.random.key_of(seed, qualified name)``. place: where an input lies in the whole; it
    reads shapes only. ``calls`` counts training calls, and is what a resumed run sets; every rank counts alike, since
    all run the same program.

    A replay inside backward (non-reentrant checkpointing) drops what the call that it repeats dropped. Autograd's
    sequence numbers tell which one that was. A replay starts at the node with the highest number of those that wait
    for its values, so the last call before that node belongs to the replayed region, and no call of the region that
    anybody waits for comes later. Hence the limits, each an error and never another mask: one call of a layer in one
    replayed region, regions inside others only with checkpoint's early stop, no reentrant checkpointing, and
    ``REMEMBERED`` calls ahead of backward. Forward passes are taken to run on one thread, and a region's nodes on one
    device.
    """

    def __init__(self, p: float, key: int, place: Place):
        super().__init__()
        self.p, self.key, self.place = p, key, place
        self.calls = 0
        self._made: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)  # (autograd's next sequence number, call)
        self._replay: tuple[int, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h_local] → the same shape and dtype; x itself in eval mode and where p is 0."""
        if not self.training or self.p == 0:
            return x
        if torch._C._current_graph_task_id() == -1:
            call, self.calls = self.calls, self.calls + 1
            self._made.append((torch._C._autograd._get_sequence_nr(), call))
        else:
            call = self._repeated()
        y: torch.Tensor = _Drop.apply(x, self.p, fold(self.key, call), self.place(x))
        return y

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def _repeated(self) -> int:
        """The number of the call that is being replayed."""
        node = torch._C._current_autograd_node()
        if node is None or type(node).__name__ == "CheckpointFunctionBackward":
            raise RuntimeError("dropout: found reentrant checkpointing; allowed: use_reentrant=False")
        replay = (torch._C._current_graph_task_id(), node._sequence_nr())
        if replay == self._replay:
            raise RuntimeError(
                "dropout: found a second call in one replayed region; allowed: one (a layer for each place, "
                "and early stop where one checkpointed region is inside another)"
            )
        self._replay = replay
        for made, call in reversed(self._made):
            if made <= replay[1]:
                return call
        if len(self._made) == REMEMBERED:
            raise RuntimeError(f"dropout: found a replay of a call before the last {REMEMBERED}; allowed: fewer ahead")
        # Made after every node that waits for replayed values: nobody reads this result.
        return 0


class ForwardDraws(nn.Module):
    """What a model's own code draws in a training forward: from a generator state of the key and the call's number.

    So dropout and router noise of code that is not ours follow the plan's seed, a resumed run continues them, and a
    replay, whose checkpoint keeps the generator's state, repeats them. key: of seed and data rank. ``calls`` counts
    training calls. The state that others draw from is as it was afterwards.
    """

    def __init__(self, key: int, device: torch.device):
        super().__init__()
        self.key, self.calls = key, 0
        self._devices = [] if device.type == "cpu" else [device]

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """One training call."""
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(fold(self.key, self.calls))
            self.calls += 1
            yield


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, key: int, place: tuple[int, int, int]) -> torch.Tensor:
        ctx.mask = (p, key, place)
        return _dropped(x, p, key, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _dropped(grads[0], *ctx.mask), None, None, None


def _dropped(x: torch.Tensor, p: float, key: int, place: tuple[int, int, int]) -> torch.Tensor:
    """x · mask / (1 − p), in chunks of rows: an element's hash takes up to 32 bytes while it is computed."""
    first_row, first_column, columns = place
    rows = x.flatten(0, -2)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    within = torch.arange(first_column, first_column + rows.shape[1], dtype=torch.int64, device=x.device)
    # Hashes are uniform over all int64, the lowest of which are kept.
    kept = min(round((1 - p) * 2**64), 2**64 - 1) - 2**63
    height = max(1, CHUNK // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], height):
        stop = min(start + height, rows.shape[0])
        before = torch.arange(first_row + start, first_row + stop, dtype=torch.int64, device=x.device).mul_(columns)
        mask = hashed(before[:, None] + within, key) < kept
        torch.mul(rows[start:stop], mask, out=y[start:stop])
    return y.mul_(1 / (1 - p) if p < 1 else 0.0).view(x.shape)
