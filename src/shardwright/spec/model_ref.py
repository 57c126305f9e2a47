"""The model that a plan is for: its config file, and what that file held when the plan was made."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from shardwright.errors import InputError
from shardwright.files.messages import FieldError
from shardwright.files.parser import STRICT
from shardwright.spec.plan_fields import Text


class ModelRef(BaseModel):
    """The model that a plan is for."""

    model_config = STRICT

    config: Text = Field(description="path of a Hugging Face config.json, relative to the plan file")
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of that file's bytes",
        json_schema_extra={"x-allowed": "the SHA-256 of the config file, 64 digits of 0-9 and a-f"},
    )

    @model_validator(mode="after")
    def _matches(self, info: ValidationInfo) -> ModelRef:
        if info.context:
            path = info.context["directory"] / self.config
            if path.is_file() and (now := sha256_of(path)) != self.sha256:
                raise FieldError(
                    ("sha256",), self.sha256, f"{now}, that of {self.config} as it is now (plan again if it changed)"
                )
        return self


def sha256_of(path: Path) -> str:
    """SHA-256 of the file's bytes, 64 hexadecimal digits."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"config: found {error.strerror} at {path}; allowed: a readable file") from None
