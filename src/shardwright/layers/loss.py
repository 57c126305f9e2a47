"""Cross entropy over logits whose vocabulary is split: no rank sees a whole row.

| pass     | in                         | collectives                                              | out             |
|----------|----------------------------|----------------------------------------------------------|-----------------|
| forward  | logits [T,V/n], labels [T] | all-gather of (maximum, log Σ, target logit) [3,T]       | loss, 0-dim     |
| backward | dloss                      | none                                                     | dlogits [T,V/n] |

With the row's maximum M and L = log Σ exp(logits − M): loss = Σ (L − (target − M)) / count, dlogits = (softmax −
one-hot) · dloss / count, softmax = exp((logits − M) − L). M is exact and L is small, so both are as exact for logits
that share an offset as for those that do not; log Z = M + L would round L to the precision of M.
The softmax is taken in at least fp32, a chunk of rows at a time, so that no second copy of the logits is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright import trace
from shardwright.comm.collectives import all_gather, all_reduce
from shardwright.comm.groups import AxisGroup
from shardwright.layers.classes import check_classes
from shardwright.runtime.runtime import Runtime

IGNORED = -100
"""The label of a token without a target."""

ROWS, NUMBERS = 1024, 2**24
"""Rows at a time: so many, and more where they are so short that fewer numbers than these would be at work."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor, first: int, group: AxisGroup
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, width = logits.shape
        normaliser = torch.empty(2, rows, dtype=wide, device=logits.device)  # M and L, of this part
        local = labels - first
        foreign = (local < 0) | (local >= width)
        if width:
            chunks = zip(*(whole.split(_rows(width), dim=-2) for whole in (logits, normaliser.t())), strict=True)
            for part, out in chunks:
                _normalise(part, out)
            target = logits.gather(1, local.masked_fill(foreign, 0).unsqueeze(1)).squeeze(1).to(wide)
            target.masked_fill_(foreign, 0)
        else:  # a rank behind the end of a vocabulary that does not divide
            normaliser.fill_(-torch.inf)
            target = normaliser.new_zeros(rows)
        if group.size > 1:
            mine = torch.cat((normaliser, target.unsqueeze(0)))
            every = mine.new_empty(group.size, 3, rows)
            all_gather(mine.unsqueeze(0), every, group, "loss")
            normaliser, target = _join(every[:, 0], every[:, 1]), every[:, 2].sum(0)
        losses = (normaliser[1] - (target - normaliser[0])).masked_fill_(labels == IGNORED, 0)
        ctx.first, ctx.wide = first, wide
        ctx.save_for_backward(logits, labels, normaliser, count)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        logits, labels, normaliser, count = ctx.saved_tensors
        width = logits.shape[1]
        scale = (grads[0] / count).to(ctx.wide)
        gradient = torch.empty_like(logits)
        if not width:
            return gradient, None, None, None, None
        local = labels - ctx.first
        present = (local >= 0) & (local < width)
        rowwise = (  # [T,1] each
            normaliser[0].unsqueeze(1),
            normaliser[1].unsqueeze(1),
            torch.where(present, local, 0).unsqueeze(1),
            present.to(ctx.wide).neg_().unsqueeze(1),
            torch.where(labels == IGNORED, 0, scale).unsqueeze(1),
        )
        chunks = zip(*(whole.split(_rows(width)) for whole in (logits, gradient, *rowwise)), strict=True)
        for part, out, most, log_sum, column, minus_one, factor in chunks:
            soft = (part - most).sub_(log_sum).exp_()  # the maximum is wide, so soft is
            torch.mul(soft.scatter_add_(1, column, minus_one), factor, out=out)
            del soft  # before the next chunk's is made
        return gradient, None, None, None, None


def _normalise(part: torch.Tensor, out: torch.Tensor) -> None:
    """Row maximum and log Σ exp(logits − maximum) of ``part`` [R,V/n], into ``out`` [R,2]."""
    most = part.amax(1).to(out.dtype)
    # A part of nothing but −∞ (classes that were masked off) has a sum of 0, not of exp(−∞ + ∞).
    shifted = part - most.masked_fill(most == -torch.inf, 0).unsqueeze(1)
    out[:, 0] = most
    out[:, 1] = shifted.exp_().sum(1).log_()


def _join(most: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """M and L [2,T] of whole rows, from those of their parts [n,T] each."""
    whole = most.amax(0)
    return torch.stack((whole, torch.logsumexp(log_sums + (most - whole), dim=0)))


def _rows(width: int) -> int:
    return max(ROWS, NUMBERS // width)


class VocabParallelLoss:
    """Cross entropy of logits [.., T, V/n] against labels [..]: the sum over tokens, over the count of targets.

    vocab_axes: the mesh axes that split the vocabulary. token_axes: those that split the tokens of logits and labels.
    split_axes: those that split the tokens of the logits further; labels come whole along them. Labels are class
    numbers, or −100 for tokens without a target. The count is given (a number or 0-dim tensor: targets of all token
    axes and micro-batches), or taken here by one small all-reduce over the token axes. A count of 0 gives loss 0.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        vocab_axes: tuple[str, ...] = (),
        token_axes: tuple[str, ...] = (),
        split_axes: tuple[str, ...] = (),
    ):
        runtime = Runtime.of(mesh)
        self.vocab = runtime.group(vocab_axes)
        self.tokens = runtime.group(token_axes)
        self.split = runtime.group(split_axes)
        self.shares = runtime.group(token_axes + split_axes)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        count: torch.Tensor | int | None = None,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """This rank's share of the mean loss, 0-dim: summed over ``shares`` (token and split axes) it is the mean.

        vocab_size: V, needed where the ranks' parts differ; by default each has as many classes as this one.
        Raises InputError for a label that is neither a class nor −100 (on a device, an assertion that says so).
        """
        with trace.span("loss"):
            logits, labels = logits.flatten(0, -2), labels.reshape(-1)
            if count is None:
                count = self.count_targets(labels)
            elif not isinstance(count, torch.Tensor):
                count = labels.new_full((), count)
            classes = logits.shape[-1] if self.vocab.size == 1 else vocab_size or logits.shape[-1] * self.vocab.size
            check_classes("labels", labels, classes, IGNORED)
            labels = labels[slice(*self.split.bounds(labels.shape[0]))]
            first, _ = self.vocab.bounds(classes)
            loss: torch.Tensor = _CrossEntropy.apply(logits, labels, count.clamp(min=1), first, self.vocab)
            return loss

    def count_targets(self, *labels: torch.Tensor) -> torch.Tensor:
        """Targets in all of ``labels`` (this rank's micro-batches), over all token axes: a 0-dim int64 tensor."""
        count = torch.stack([(part != IGNORED).sum() for part in labels]).sum()
        all_reduce(count, self.tokens, "loss")
        return count
