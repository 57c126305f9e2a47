"""What a rehearsal of a plan says of one training step, as a plan file holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, field_validator

from shardwright.files.messages import FieldError
from shardwright.files.parser import STRICT
from shardwright.spec.plan_fields import Bytes

PHASES = ("forward", "loss", "backward", "step")
"""The phases of a training step, in order."""


class Predicted(BaseModel):
    """What a rehearsal of the plan says of one training step."""

    model_config = STRICT

    peak: dict[str, Bytes] = Field(
        description=f"phase ({', '.join(PHASES)}) → most bytes of tensor storage alive in it, on the fullest rank",
        json_schema_extra={"propertyNames": {"enum": list(PHASES)}},
    )
    rank_classes: dict[str, Any] | None = Field(
        default=None, description="class of ranks that do the same → its own figures (bytes)"
    )
    saved: Bytes = Field(description="bytes that the autograd graph holds at the end of forward")
    volume: Bytes = Field(description="bytes that one rank sends in step 1")
    time: float | None = Field(default=None, ge=0, description="seconds of one step; null where it was not computed")

    @field_validator("peak")
    @classmethod
    def _phases(cls, peak: dict[str, int]) -> dict[str, int]:
        check_known(peak, PHASES, "the phase")
        return peak


def check_known(mapping: Mapping[str, Any], allowed: tuple[str, ...], what: str) -> None:
    """Raises FieldError for a key that is not ``allowed``. what: the kind of thing that keys name."""
    for name in mapping:
        if name not in allowed:
            raise FieldError((name,), f"{what} {name!r}", ", ".join(allowed))
