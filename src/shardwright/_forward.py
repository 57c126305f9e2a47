"""What happens around a model's own forward code: keywords are checked, blocks see carriers, the loss is ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright._errors import InputError
from shardwright.layers import GridDropout, VocabParallelLoss
from shardwright.layers.loss import IGNORED
from shardwright.linear import SiteProduct
from shardwright.linear.carrier import Carrier, TokenShape, tokens_of
from shardwright.params import Schedule

TOKENS = "shardwright_tokens"
"""The keyword by which a forward pass tells its blocks [batch, sequence], also when a block is replayed."""


class CausalLoss:
    """Hugging Face's ``loss_function`` over this rank's logits."""

    def __init__(self, over_vocabulary: VocabParallelLoss):
        self.over_vocabulary = over_vocabulary

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """This rank's share of the mean loss. labels [B,S] name the tokens themselves, shift_labels the next ones."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        return self.over_vocabulary(logits, shift_labels, num_items_in_batch, vocab_size)


class BeginForward:
    """Before the model: what would be silently wrong is refused, and the shape of the batch is told.

    head: the site of the logits, where the model has sites.
    """

    def __init__(self, shape: TokenShape, head: SiteProduct | None):
        self.shape, self.head = shape, head

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name in ("attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "cache", "past_key_values"):
            if kwargs.get(name) is not None:
                raise InputError(
                    f"{name}: found a value; allowed: nothing in this version (pad on the right with labels of -100, "
                    "and do not pack)"
                )
        if len(args) > 1:
            raise InputError("forward: found positional arguments after input_ids; allowed: keyword arguments")
        keep = kwargs.get("logits_to_keep")
        if isinstance(keep, torch.Tensor) or keep:
            raise InputError("logits_to_keep: found a value; allowed: nothing, since tokens are split")
        ids = args[0] if args else kwargs["input_ids"]
        if self.head is None:
            return None
        self.shape.batch, self.shape.sequence = ids.shape
        self.head.tokens = ids.shape.numel()
        return args, {**kwargs, TOKENS: tuple(ids.shape)}


class EndForward:
    """After the model: a forward without gradients leaves nothing gathered."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.schedule.rest()


class CarryIn:
    """Before attention: the tokens [1,T_local,h] go in as a carrier [B,S,h], and the block's sites learn B·S."""

    def __init__(self, shape: TokenShape, sites: list[SiteProduct]):
        self.shape, self.sites = shape, sites

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch, sequence = kwargs.pop(TOKENS)
        self.shape.batch, self.shape.sequence = batch, sequence  # in a replay, another forward may have come since
        for site in self.sites:
            site.tokens = batch * sequence
        if args:
            return (Carrier(args[0], batch, sequence), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": Carrier(kwargs["hidden_states"], batch, sequence)}


class CarryOut:
    """After the last norm: model code may reshape the hidden states again, so it sees a carrier."""

    def __init__(self, shape: TokenShape):
        self.shape = shape

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> Carrier:
        return Carrier(output, self.shape.batch, self.shape.sequence)


class Clear:
    """After attention or MLP, come what may: no sibling's result is kept."""

    def __init__(self, sites: list[SiteProduct]):
        self.sites = sites

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for site in self.sites:
            site.clear()


class HiddenDropout(GridDropout):
    """Dropout of hidden states: rows are tokens, also those that a carrier holds."""

    def forward(self, x: Any) -> Any:
        """x [1,T_local,h], or a carrier of it."""
        if isinstance(x, Carrier):
            return Carrier(super().forward(x.tokens), x.shape[0], x.shape[1])
        return super().forward(x)


class ScoreDropout(GridDropout):
    """Dropout of attention weights: rows are sequences, columns (head, query, key).

    place: (first sequence of this rank, its first head, heads of all ranks).
    """

    def __init__(self, p: float, key: int, place: tuple[int, int, int]):
        self.first_sequence, self.first_head, self.heads = place
        self.size = 0
        super().__init__(p, key, lambda _: (self.first_sequence, self.first_head * self.size, self.heads * self.size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B,H_local,S,S]."""
        self.size = x.shape[2] * x.shape[3]  # of one head
        return super().forward(x.reshape(x.shape[0], -1)).view(x.shape)


def take_tokens(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (tokens_of(args[0]), *args[1:])
