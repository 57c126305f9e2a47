"""What happens around a model's own forward code: keywords are checked, blocks see carriers, the loss is ours."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright import trace
from shardwright.errors import InputError
from shardwright.layers.dropout import GridDropout
from shardwright.layers.loss import IGNORED, VocabParallelLoss
from shardwright.linear.site_product import SiteProduct
from shardwright.params.schedule import Schedule
from shardwright.reshard.carrier import Carrier, TokenShape, tokens_of

TOKENS = "shardwright_tokens"
"""The keyword by which a forward pass tells its blocks [batch, sequence], also when a block is replayed."""


OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""What a model may give beside its logits: not done here, by keyword or by config."""

UNDERSTOOD = (
    "input_ids", "labels", "shift_labels", "num_items_in_batch", "return_dict", "attention_mask", "position_ids"
)  # fmt: skip
"""Keywords of a forward pass that take effect."""

OFF = ("use_cache", *OUTPUTS, "logits_to_keep")
"""Keywords that ask for something that is not done here; their values may be what asks for nothing."""


def check_config(config: Any) -> None:
    """Raises InputError for a config that asks every forward pass for something that is not done here."""
    for name in OUTPUTS:
        if getattr(config, name, None):
            raise InputError(f"{config.model_type}: {name}: found True; allowed: False")


def check_keywords(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The token ids of a call of the model. Raises InputError for what it was given beside what is understood."""
    if len(args) > 1:
        raise InputError("forward: found positional arguments after input_ids; allowed: keyword arguments")
    for name, value in kwargs.items():
        if value is None or name in UNDERSTOOD:
            continue
        if name not in OFF:
            raise InputError(f"{name}: found a value; allowed: nothing (a forward pass takes {', '.join(UNDERSTOOD)})")
        if isinstance(value, torch.Tensor) or value:
            raise InputError(f"{name}: found {'a tensor' if isinstance(value, torch.Tensor) else value}; allowed: none")
    ids = args[0] if args else kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise InputError(f"input_ids: found {type(ids).__name__}; allowed: a tensor of token ids [batch, sequence]")
    return ids


class CausalLoss:
    """Hugging Face's ``loss_function`` over this rank's logits."""

    def __init__(self, over_vocabulary: VocabParallelLoss):
        self.over_vocabulary = over_vocabulary
        self._made: tuple[weakref.ref[torch.Tensor], int] | None = None  # the loss of this forward, and its version

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """This rank's share of the mean loss. labels [B,S] name the tokens themselves, shift_labels the next ones.

        Raises InputError for a keyword that asks for another loss.
        """
        for name, value in more.items():
            known = name in (TOKENS, "pad_token_id", *UNDERSTOOD, *OFF) or (name, value) == ("ignore_index", IGNORED)
            if value is not None and not known:
                found = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
                raise InputError(f"loss: found {name}={found:.80} from the model; allowed: the mean over all targets")
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        loss = self.over_vocabulary(logits, shift_labels, num_items_in_batch, vocab_size)
        self._made = weakref.ref(loss), loss._version
        return loss

    def check(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """A forward hook of the model: the loss that it returns is the one made here, and nothing was added to it.

        What a model adds (of its routers, of further heads) is no sum over ranks and micro-batches, as this loss is.
        """
        made, self._made = self._made, None
        if output is None or kwargs.get("labels") is None:
            return
        found: torch.Tensor | None = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if found is None:
            what = "none"
        elif made is None or found is not made[0]():
            what = "a loss of the model's own"
        elif found._version != made[1]:
            what = "a loss to which the model adds another"
        else:
            return
        raise InputError(f"{type(module).__name__}: found {what}; allowed: models that return what loss_function gives")


class BeginForward:
    """Before a model with sites: keywords are checked, and the shape of the batch is told.

    A mask of ones and the positions 0 … S−1, as collators send them, say what holds anyway: they are looked at, and
    left away. On an accelerator the look waits for the device; who leaves them out does not wait. Fake tensors have
    nothing to look at, so a rehearsal refuses them.

    head: the site of the logits.
    """

    def __init__(self, shape: TokenShape, head: SiteProduct):
        self.shape, self.head = shape, head

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids = check_keywords(args, kwargs)
        batch, sequence = ids.shape
        kept = {name: value for name, value in kwargs.items() if name not in ("attention_mask", "position_ids")}
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None and not _holds(mask, 1, [(batch, sequence)]):
            raise InputError(
                f"attention_mask: found {_seen(mask)}; allowed: ones [{batch}, {sequence}] (pad on the right with "
                "labels of -100)"
            )
        if positions is not None:
            usual = torch.arange(sequence, device=positions.device)
            if not _holds(positions, usual, [(batch, sequence), (1, sequence), (sequence,)]):
                raise InputError(f"position_ids: found {_seen(positions)}; allowed: 0 to {sequence - 1} in every row")
        self.shape.batch, self.shape.sequence = batch, sequence
        self.head.tokens = ids.shape.numel()
        return args, {**kept, TOKENS: (batch, sequence)}


def _holds(tensor: Any, values: Any, shapes: list[tuple[int, ...]]) -> bool:
    """Whether the tensor has one of the shapes, and these values throughout."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tuple(tensor.shape) not in shapes:
        return False
    with trace.quiet(), torch.no_grad():
        return bool((tensor == values).all())


def _seen(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{list(tensor.shape)} of {'no' if isinstance(tensor, FakeTensor) else 'other'} values"


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
