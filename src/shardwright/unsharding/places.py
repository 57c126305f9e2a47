"""Where plain modules use stored parameters, and what they show there outside of any forward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright import trace
from shardwright.params.stored import StoredParameter


@dataclass(frozen=True)
class Place:
    """Where a plain module uses a parameter: ``module.key``. param_group: the name of the parameter group whose module
    that lies in.

    The module holds the place by its hooks, so the place does not hold the module: who drops a model frees it.
    """

    holder: str
    reference: weakref.ref[nn.Module]
    key: str
    stored: StoredParameter
    param_group: str

    @property
    def module(self) -> nn.Module:
        """The module, which lives as long as somebody calls it."""
        module = self.reference()
        assert module is not None
        return module


class ShownParameters:
    """Unsharded parameters that modules show outside of any forward, to whoever reads them; not to differentiate."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    def show(self, places: Sequence[Place]) -> None:
        """The modules of ``places`` have plain whole tensors where their parameters were."""
        self.hide()
        for place in places:
            module = place.reference()
            if module is not None and place.key not in module.__dict__:
                with trace.quiet():
                    module.__dict__[place.key] = place.stored.readable.detach()
                self._places.append(place)

    def hide(self) -> None:
        """The modules have their DTensors again."""
        places, self._places = self._places, []
        for place in places:
            module = place.reference()
            if module is not None:
                module.__dict__.pop(place.key, None)
