"""Shards read straight from a Hugging Face directory: each rank reads its own slices of safetensors files.

``model.safetensors``, or the files that ``model.safetensors.index.json`` names. Pickles (``pytorch_model.bin``) are not
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from shardwright.checkpoint.boxes import boxes
from shardwright.checkpoint.tensor_file import kind_of, open_tensors, read_box
from shardwright.errors import InputError
from shardwright.values.placement import Cut

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, or the one that tells which file holds which."""

CPU = torch.device("cpu")

Place = tuple[nn.Module, str]
"""A module and the name of one of its parameters or buffers."""


class _Saved(NamedTuple):
    """A tensor in a file."""

    file: Path
    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class SavedWeights:
    """The source of shards that are read from files, and the persistent buffers in those files."""

    def __init__(self, found: Mapping[Place, _Saved], device: torch.device):
        self._found, self._device = found, device

    def __call__(self, module: nn.Module, name: str, cut: Cut) -> torch.Tensor:
        """This rank's shard of ``module.name``."""
        weight = self._found[module, name]
        shard = torch.empty(cut.local_shape, dtype=getattr(module, name).dtype, device=self._device)
        with open_tensors(weight.file) as file:
            for whole, mine in boxes(cut):
                shard[mine.slices] = read_box(file, weight.key, whole).to(self._device)
        return shard

    def buffers(self) -> dict[Place, torch.Tensor]:
        """(module, name) → the saved values of each persistent buffer, whole."""
        whole = {
            place: Cut(weight.shape, tuple(((0, length),) for length in weight.shape))
            for place, weight in self._found.items()
            if place[1] in place[0]._buffers
        }
        return {(module, name): self(module, name, cut) for (module, name), cut in whole.items()}


def from_safetensors(directory: str | Path, names: Mapping[nn.Module, str], device: torch.device = CPU) -> SavedWeights:
    """The weights in a Hugging Face directory, converted to the parameters' own floating-point types.

    names: qualified module names of the whole model, before anything is changed. Of the names of a tied parameter one
    must be there. Names may lack the prefix of the base model (``transformer.`` of GPT-2). Persistent buffers are read
    too (models/buffers.py puts them into the model).

    Raises InputError, one line that names the weight, before any value is read: for a parameter or persistent buffer
    that is missing or has another shape, and for a weight that is neither and that Hugging Face's model does not
    ignore either.
    """
    directory = Path(directory)
    return SavedWeights(_matched(directory, _saved_in(directory), names), device)


def _saved_in(directory: Path) -> dict[str, _Saved]:
    """Key → where it is, as the headers of the files tell."""
    if (directory / WEIGHTS).is_file():
        keys_of: dict[str, list[str] | None] = {WEIGHTS: None}
    elif (directory / INDEX).is_file():
        keys_of = dict(_keys_by_file(directory / INDEX))
    else:
        bins = sorted(path.name for path in directory.glob("*.bin")) if directory.is_dir() else []
        found = f"{bins[0]}, a pickle" if bins else "neither" if directory.is_dir() else "no such directory"
        raise InputError(f"{directory}: found {found}; allowed: a directory with {WEIGHTS} or {INDEX}")
    saved: dict[str, _Saved] = {}
    for name, keys in keys_of.items():
        path = directory / name
        with open_tensors(path) as file:
            here = set(file.keys())
            for key in sorted(here) if keys is None else keys:
                if key not in here:
                    raise InputError(f"{path}: {key}: found no such weight; allowed: those that {INDEX} tells")
                saved[key] = _Saved(path, key, *kind_of(file, key))
    return saved


def _keys_by_file(index: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for key, name in weights.items():
            if Path(name).name != name:
                raise InputError(f"{index}: weight_map.{key}: found {name!r}; allowed: a file of the same directory")
            found.setdefault(name, []).append(key)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{index}: found no weight_map; allowed: a mapping of weight names to file names") from None
    return found


def _matched(directory: Path, saved: Mapping[str, _Saved], names: Mapping[nn.Module, str]) -> dict[Place, _Saved]:
    """(module, name of a parameter or persistent buffer) → its weight."""
    root = next((module for module, name in names.items() if not name), None)
    prefix = f"{getattr(root, 'base_model_prefix', '')}."
    holders: dict[int, list[Place]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module in names:
        lasting = {
            name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for name, tensor in (module._parameters | lasting).items():
            if tensor is not None:
                holders.setdefault(id(tensor), []).append((module, name))
                tensors[id(tensor)] = tensor
    found: dict[Place, _Saved] = {}
    missing, used = list[str](), set[str]()
    for identity, places in holders.items():
        qualified = [f"{names[module]}.{name}".removeprefix(".") for module, name in places]
        keys = [key for name in qualified for key in (name, name.removeprefix(prefix)) if key in saved]
        if not keys:
            missing.append(qualified[0])
            continue
        used |= set(keys)
        _check(saved[keys[0]], tensors[identity])
        found |= dict.fromkeys(places, saved[keys[0]])
    if missing:
        more = f" (nor of {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise InputError(f"{directory}: {missing[0]}: found no weight of that name{more}; allowed: every parameter's")
    surplus = [key for key in saved if key not in used and not _ignored(key, root)]
    if surplus:
        more = f" (and {len(surplus) - 1} others)" if len(surplus) > 1 else ""
        raise InputError(f"{directory}: {surplus[0]}: found a weight{more}; allowed: those of the model's parameters")
    return found


def _check(weight: _Saved, parameter: torch.Tensor) -> None:
    if weight.shape != tuple(parameter.shape):
        raise InputError(
            f"{weight.file}: {weight.key}: found {list(weight.shape)}; allowed: {list(parameter.shape)}, as the "
            "config tells"
        )
    if weight.dtype is None or weight.dtype.is_floating_point != parameter.dtype.is_floating_point:
        found = "an unknown element type" if weight.dtype is None else str(weight.dtype).removeprefix("torch.")
        kind = "floating-point" if parameter.dtype.is_floating_point else "whole"
        raise InputError(f"{weight.file}: {weight.key}: found {found}; allowed: {kind} values")


def _ignored(key: str, root: nn.Module | None) -> bool:
    """Whether Hugging Face's model passes over a weight of that name: buffers that old versions saved."""
    patterns = [*(getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    return any(re.search(pattern, key) for pattern in patterns)
