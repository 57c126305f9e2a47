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

from shardwright._errors import InputError
from shardwright.params.initial import Source
from shardwright.params.pieces import boxes
from shardwright.params.placement import Cut
from shardwright.params.tensor_file import kind_of, open_tensors, read_box

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, or the one that tells which file holds which."""

CPU = torch.device("cpu")


class _Saved(NamedTuple):
    """A tensor in a file."""

    file: Path
    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def from_safetensors(directory: str | Path, names: Mapping[nn.Module, str], device: torch.device = CPU) -> Source:
    """The weights in a Hugging Face directory, converted to the parameters' own floating-point types.

    names: qualified module names of the whole model, before anything is changed. Of the names of a tied parameter one
    must be there. Names may lack the prefix of the base model (``transformer.`` of GPT-2).

    Raises InputError, one line that names the weight, before any value is read: for a parameter that is missing or has
    another shape, and for a weight that is no parameter and that Hugging Face's model does not ignore either.
    """
    directory = Path(directory)
    saved = _saved_in(directory)
    found = _matched(directory, saved, names)

    def source(module: nn.Module, name: str, cut: Cut) -> torch.Tensor:
        weight = found[module, name]
        shard = torch.empty(cut.local_shape, dtype=getattr(module, name).dtype, device=device)
        with open_tensors(weight.file) as file:
            for whole, mine in boxes(cut):
                shard[mine.slices] = read_box(file, weight.key, whole).to(device)
        return shard

    return source


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


def _matched(
    directory: Path, saved: Mapping[str, _Saved], names: Mapping[nn.Module, str]
) -> dict[tuple[nn.Module, str], _Saved]:
    """(module, parameter name) → its weight."""
    root = next((module for module, name in names.items() if not name), None)
    prefix = f"{getattr(root, 'base_model_prefix', '')}."
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in names:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    found: dict[tuple[nn.Module, str], _Saved] = {}
    missing, used = list[str](), set[str]()
    for identity, places in holders.items():
        qualified = [f"{names[module]}.{name}".removeprefix(".") for module, name in places]
        keys = [key for name in qualified for key in (name, name.removeprefix(prefix)) if key in saved]
        if not keys:
            missing.append(qualified[0])
            continue
        used |= set(keys)
        _check(saved[keys[0]], parameters[identity])
        found |= dict.fromkeys(places, saved[keys[0]])
    if missing:
        more = f" (nor of {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise InputError(f"{directory}: {missing[0]}: found no weight of that name{more}; allowed: every parameter's")
    surplus = [key for key in saved if key not in used and not _ignored(key, root)]
    if surplus:
        more = f" (and {len(surplus) - 1} others)" if len(surplus) > 1 else ""
        raise InputError(f"{directory}: {surplus[0]}: found a weight{more}; allowed: those of the model's parameters")
    return found


def _check(weight: _Saved, parameter: nn.Parameter) -> None:
    if weight.shape != tuple(parameter.shape):
        raise InputError(
            f"{weight.file}: {weight.key}: found {list(weight.shape)}; allowed: {list(parameter.shape)}, as the "
            "config tells"
        )
    if weight.dtype is None or weight.dtype.is_floating_point != parameter.dtype.is_floating_point:
        found = "an unknown element type" if weight.dtype is None else str(weight.dtype).removeprefix("torch.")
        raise InputError(f"{weight.file}: {weight.key}: found {found}; allowed: floating-point values")


def _ignored(key: str, root: nn.Module | None) -> bool:
    """Whether Hugging Face's model passes over a weight of that name: buffers that old versions saved."""
    patterns = [*(getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    return any(re.search(pattern, key) for pattern in patterns)
