"""The manifest of a checkpoint: JSON that tells, of every tensor, which piece is in which file, and where the run was.

A checkpoint is a directory of safetensors files and this one file, which is written last. A tensor's pieces are boxes
that together make the whole, whatever layout wrote them. Reading a checkpoint unpickles nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.tensor_file import DTYPES
from shardwright.errors import InputError
from shardwright.files.messages import FieldError
from shardwright.files.parser import STRICT, Version1, check

MANIFEST = "manifest.json"
"""The name of the manifest in a checkpoint."""


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise FieldError((), repr(name), ", ".join(DTYPES))
    return name


Count = Annotated[int, Field(ge=0)]
Dtype = Annotated[str, AfterValidator(_known_dtype)]
FileName = Annotated[str, Field(pattern=r"^pieces-[0-9]+\.safetensors$")]
"""A file of the checkpoint's own directory."""


class RunState(BaseModel):
    """Where a run stands; what its tensors do not tell.

    The batch of a step is a function of seed, step and tokens, so ``step`` is the position in the data too.
    """

    model_config = STRICT

    step: Count = Field(description="optimizer steps that are done")
    seed: Count = Field(default=0, description="seed of the initial weights and of the order of the data")
    tokens: Count = Field(default=0, description="tokens of the data that the run reads")
    model: str = Field(default="", description="SHA-256 of the model's config")
    plan: str = Field(default="", description="SHA-256 of the plan that wrote the checkpoint")


class SavedPiece(BaseModel):
    """A box of a tensor, whole in one file, under the name that ``piece_name`` gives."""

    model_config = STRICT

    offsets: list[Count]
    shape: list[Count]
    file: FileName

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box(tuple(self.offsets), tuple(self.shape))


class SavedTensor(BaseModel):
    """One tensor: its element type (by safetensors' name), its shape, and the pieces that make it."""

    model_config = STRICT

    dtype: Dtype
    shape: list[Count]
    pieces: list[SavedPiece]

    @model_validator(mode="after")
    def _pieces_make_the_whole(self) -> SavedTensor:
        for index, piece in enumerate(self.pieces):
            box = piece.box
            ends = [start + length for start, length in zip(box.offsets, box.shape, strict=False)]
            if not len(box.offsets) == len(box.shape) == len(self.shape) or any(
                end > length for end, length in zip(ends, self.shape, strict=False)
            ):
                raise FieldError(("pieces", index), f"{piece.shape} at {piece.offsets}", f"a box of {self.shape}")
        elements = sum(piece.box.numel for piece in self.pieces)
        if elements != math.prod(self.shape) or len({piece.box for piece in self.pieces}) < len(self.pieces):
            raise FieldError(
                ("pieces",), f"{elements} elements", f"the {math.prod(self.shape)} of {self.shape}, each once"
            )
        return self


class Manifest(BaseModel):
    """All that a checkpoint says of itself.

    files: name → bytes. tensors: ``model.NAME``, ``optimizer.NAME.exp_avg`` and so on, where NAME is the Hugging Face
    state-dict name of a parameter. dropout: qualified name of a layer → training calls so far.
    """

    model_config = STRICT

    version: Version1
    state: RunState
    dropout: dict[str, Count]
    files: dict[FileName, Count]
    tensors: dict[str, SavedTensor]

    @classmethod
    def load(cls, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint, every file of which is there.

        Raises NotWhole (an InputError, one line), or InputError where another version has written it."""
        path = checkpoint / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotWhole(f"{checkpoint}: found no {MANIFEST}; allowed: a whole checkpoint") from None
        except (OSError, ValueError) as error:
            found = " ".join(str(error).split())
            raise NotWhole(f"{path}: found {found}; allowed: the manifest of a whole checkpoint") from None
        if not isinstance(data, dict):
            raise NotWhole(f"{path}: found no mapping; allowed: the manifest of a whole checkpoint")
        manifest = check(data, cls, str(path))
        for name, size in manifest.files.items():
            file = checkpoint / name
            found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            if found != f"{size} bytes":
                raise NotWhole(f"{file}: found {found}; allowed: the {size} bytes that the manifest tells")
        for key, tensor in manifest.tensors.items():
            for piece in tensor.pieces:
                if piece.file not in manifest.files:
                    raise InputError(f"{path}: tensors.{key}: found {piece.file}; allowed: a file of the manifest")
        return manifest

    def text(self) -> str:
        """The manifest as the JSON that ``load`` reads."""
        data: dict[str, Any] = self.model_dump()
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


class NotWhole(InputError):
    """A directory that no finished save has left, or that has lost something since."""


def is_whole(checkpoint: Path) -> bool:
    """Whether a directory is a whole checkpoint; InputError where it is one that this version cannot read."""
    try:
        Manifest.load(checkpoint)
    except NotWhole:
        return False
    return True


def piece_name(tensor: str, box: Box) -> str:
    """The name of a piece in its file: ``model.norm.weight[0:48]``."""
    ranges = ",".join(f"{start}:{start + length}" for start, length in zip(box.offsets, box.shape, strict=True))
    return f"{tensor}[{ranges}]"
