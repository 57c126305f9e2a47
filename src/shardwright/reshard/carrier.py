"""A carrier: shows the shape that model code expects, [B,S,h], and holds this rank's tokens [1,T_local,h].

Model code reads its shape and device, builds positions from them, and passes it on; the site that receives it takes the
tokens out. Elementwise operations (a scale, a sum with another carrier) act on the tokens. Anything else is refused,
since it would need tokens that other ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TokenShape:
    """The [batch, sequence] of the forward pass at work: state of one model, set when its forward begins."""

    batch: int = 0
    sequence: int = 0


class Carrier:
    """Stands for hidden states [batch, sequence, h], of which this rank holds ``tokens`` [1,T_local,h]."""

    def __init__(self, tokens: torch.Tensor, batch: int, sequence: int):
        self.tokens = tokens
        self.shape = torch.Size((batch, sequence, tokens.shape[-1]))
        self.device, self.dtype, self.ndim = tokens.device, tokens.dtype, 3

    @property
    def rows(self) -> int:
        """T: the tokens of all ranks that share them."""
        return self.shape[0] * self.shape[1]

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As a tensor's."""
        return 3

    def _like(self, tokens: torch.Tensor) -> Carrier:
        return Carrier(tokens, self.shape[0], self.shape[1])

    def to(self, *args: Any, **kwargs: Any) -> Carrier:
        """The tokens moved or converted, as a tensor's."""
        return self._like(self.tokens.to(*args, **kwargs))

    def view(self, *shape: Any) -> Carrier:
        """Only to its own shape (-1 and rank-local sizes included): model code restores what was never lost."""
        return self

    def __getitem__(self, place: Any) -> Carrier:
        """Only all of it."""
        for part in place if isinstance(place, tuple) else (place,):
            if not (isinstance(part, slice) and part.step is None and not part.start and part.stop is None):
                raise TypeError(f"hidden states: found an index {place!r}; allowed: all tokens, since they are split")
        return self

    __iter__ = None  # nothing to iterate over, which Hugging Face's output classes ask

    def __add__(self, other: Any) -> Carrier:
        return self._like(self.tokens + _tokens_for(self, other))

    def __mul__(self, other: Any) -> Carrier:
        return self._like(self.tokens * _tokens_for(self, other))

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.dropout and not (kwargs["p"] and kwargs["training"]):
            return args[0]
        raise TypeError(
            f"hidden states: found {getattr(function, '__name__', function)} on tokens that are split; allowed: "
            "sums and scales, and the modules that the model's rule table covers"
        )


def _tokens_for(carrier: Carrier, other: Any) -> Any:
    if isinstance(other, Carrier):
        if other.shape != carrier.shape:
            raise TypeError(f"hidden states: found {other.shape} beside {carrier.shape}; allowed: equal shapes")
        return other.tokens
    if isinstance(other, torch.Tensor) and other.dim():
        raise TypeError(f"hidden states: found a tensor of shape {tuple(other.shape)}; allowed: numbers and carriers")
    return other


def tokens_of(hidden: Any) -> torch.Tensor:
    """The tokens that a carrier holds; a tensor is its own tokens."""
    tokens: torch.Tensor = hidden.tokens if isinstance(hidden, Carrier) else hidden
    return tokens
