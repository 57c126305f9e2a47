"""Tensors in safetensors files: written one at a time, read box by box. Nothing is ever unpickled.

The file is 8 bytes (little endian: how long the header is), a JSON header (name → dtype, shape, where its bytes are),
then the bytes. This writer differs from the safetensors library's in one thing: it never holds more than one tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch

from shardwright.checkpoint.boxes import Box
from shardwright.errors import InputError
from shardwright.spec.dtypes import DTYPES as ELEMENT_TYPES

DTYPES: dict[str, torch.dtype] = {
    dtype.safetensors: getattr(torch, name) for name, dtype in ELEMENT_TYPES.items() if dtype.safetensors is not None
}
"""Element types by the names that safetensors gives them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names of element types."""

ALIGNMENT = 8
"""The bytes begin at a multiple of this."""


class TensorWriter:
    """Writes a safetensors file whose tensors (name → element type, shape) are announced beforehand.

    A context manager; what is written has reached the disk when it ends without error. Raises OSError.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        # Wide elements first: then every tensor lies at a multiple of its element's size.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            start, end = end, end + math.prod(shape) * dtype.itemsize
            self._places[name] = start, end
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._first = 8 + len(text)
        self.size = self._first + end
        """Bytes of the whole file."""
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the values of the tensor announced as ``name``; each once, in any order."""
        start, end = self._places.pop(name)
        values = tensor.detach().to("cpu").contiguous().reshape(-1)
        assert values.nbytes == end - start, f"{name} is not what was announced"
        self._file.seek(self._first + start)
        self._file.write(values.view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file as file:
            if kind is None:
                assert not self._places, f"announced and not written: {', '.join(self._places)}"
                file.flush()
                os.fsync(file.fileno())


def open_tensors(path: Path) -> Any:
    """The safetensors file at ``path``, opened to be read by ``read_box``; InputError where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"{path}: found no such file; allowed: a safetensors file") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: found {' '.join(str(error).split())}; allowed: a whole safetensors file") from None


def kind_of(file: Any, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """(element type, shape) of a tensor in an open file; the type is None for one that this version does not know."""
    slices = file.get_slice(name)
    return DTYPES.get(slices.get_dtype()), tuple(slices.get_shape())


def read_box(file: Any, name: str, box: Box) -> torch.Tensor:
    """The values of ``box`` of a tensor in an open file, on the CPU; no other values are read."""
    if not box.shape:
        return cast(torch.Tensor, file.get_tensor(name))
    return cast(torch.Tensor, file.get_slice(name)[box.slices])


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory have reached the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
