"""A model as a Hugging Face directory: config.json and safetensors files, which ``from_pretrained`` opens."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.boxes import Box, held_pieces
from shardwright.checkpoint.names import named_tensors
from shardwright.checkpoint.pretrained import INDEX, WEIGHTS
from shardwright.checkpoint.tensor_file import TensorWriter, sync_directory
from shardwright.errors import InputError
from shardwright.values.placement import local_of

SHARD_BYTES = 5 * 2**30
"""Bytes of values in one file, unless a single tensor has more."""

BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What may lie beside a tokenizer.json and says more of it."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """The tokenizer that goes with a model: a file of the tokenizers library, and the token that ends a document."""

    path: Path
    end_token: str


Route = dict[str, list[tuple[int, Box]]]
"""Tensor name → which rank sends which box of it; the boxes make the whole."""


def save_pretrained(
    model: Any, directory: str | Path, shard_bytes: int = SHARD_BYTES, tokenizer: ExportedTokenizer | None = None
) -> None:
    """Writes a parallelized Hugging Face model as a directory that ``from_pretrained`` opens, bit for bit the same.

    Called on all ranks; rank 0 writes, and assembles one tensor at a time in its CPU memory. shard_bytes: bytes of
    values in one file. tokenizer: goes into the directory too, with what its own directory says of it, so that
    ``AutoTokenizer.from_pretrained`` finds it. The directory appears whole or not at all. Raises InputError, on every
    rank, where it exists and is not empty, or cannot be written.
    """
    directory = Path(os.path.abspath(directory))
    tensors = named_tensors(model)
    wholes = _assembled(tensors)
    if _rank():
        for _ in wholes:
            pass
        fault = None
    else:
        fault = _write(directory, wholes, tensors, _config_text(model, tensors), shard_bytes, tokenizer)
    (fault,) = _broadcast(fault)
    if fault is not None:
        raise InputError(fault)


def _write(
    directory: Path,
    wholes: Iterator[tuple[str, torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    config: str,
    shard_bytes: int,
    tokenizer: ExportedTokenizer | None,
) -> str | None:
    """Writes everything; returns what is wrong, in one line. All of ``wholes`` is taken, or other ranks would wait."""
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            return f"{directory}: found something there; allowed: a directory that is empty or does not exist yet"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = _files(tensors, shard_bytes)
        for file, names in files.items():
            with TensorWriter(
                temporary / file, {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            ) as out:
                for name in names:
                    assembled, whole = next(wholes)
                    assert assembled == name
                    out.write(name, whole)
        if len(files) > 1:
            size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (temporary / "config.json").write_text(config, encoding="utf-8")
        if tokenizer is not None:
            _write_tokenizer(tokenizer, temporary)
        sync_directory(temporary)
        os.rename(temporary, directory)
        sync_directory(directory.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        found = (error.strerror or type(error).__name__).lower()
        return f"{directory}: found {found}; allowed: a path in a writable directory with room"
    finally:
        for _ in wholes:
            pass
    return None


def _files(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> dict[str, list[str]]:
    """File name → names of its tensors, in the model's order."""
    groups, room = list[list[str]](), 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{index:05}-of-{len(groups):05}.safetensors": names for index, names in enumerate(groups, start=1)}


def _write_tokenizer(tokenizer: ExportedTokenizer, directory: Path) -> None:
    """The tokenizer's file, and those beside it that say more; where none does, one that names its end token."""
    shutil.copyfile(tokenizer.path, directory / "tokenizer.json")
    for name in BESIDE_TOKENIZER:
        if (beside := tokenizer.path.with_name(name)).is_file():
            shutil.copyfile(beside, directory / name)
    config = directory / BESIDE_TOKENIZER[0]
    if not config.exists():
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
        config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _config_text(model: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """The config as ``from_pretrained`` wants it; what only concerns training here is left out."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(tensors.values())).dtype
    fields = config.to_diff_dict()
    fields.pop("use_cache", None)
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


# Tensors, one at a time


def _assembled(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the whole on the CPU) of each tensor, on rank 0; other ranks send, and see an empty tensor."""
    rank, route = _rank(), _route(tensors)
    for name, tensor in tensors.items():
        mine = dict(held_pieces(tensor))
        local = local_of(tensor).detach()
        whole = torch.empty(tensor.shape if rank == 0 else (0,), dtype=tensor.dtype)
        for sender, box in route[name]:
            if rank == sender == 0:
                whole[box.slices] = mine[box].cpu()
            elif rank == 0:
                part = torch.empty(box.shape, dtype=tensor.dtype, device=local.device)
                dist.recv(part, sender)
                whole[box.slices] = part.cpu()
            elif rank == sender:
                dist.send(mine[box].contiguous(), 0)
        yield name, whole


def _route(tensors: Mapping[str, torch.Tensor]) -> Route:
    """Who sends what: rank 0 what it holds itself, else the rank with least to do of those that hold the same box."""
    held = {name: [box for box, _ in held_pieces(tensor)] for name, tensor in tensors.items()}
    if not dist.is_initialized():
        return {name: [(0, box) for box in found] for name, found in held.items()}
    everybody: list[Any] | None = [None] * dist.get_world_size() if _rank() == 0 else None
    dist.gather_object(held, everybody)
    route: Route = {}
    load = [0] * dist.get_world_size()
    for name, tensor in tensors.items() if everybody is not None else ():
        holders: dict[Box, list[int]] = {}
        for rank, each in enumerate(everybody or ()):
            for box in each[name]:
                holders.setdefault(box, []).append(rank)
        route[name] = []
        for box, ranks in holders.items():
            sender = 0 if ranks[0] == 0 else min(ranks, key=load.__getitem__)
            load[sender] += box.numel * tensor.dtype.itemsize
            route[name].append((sender, box))
    (route,) = _broadcast(route)
    return route


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _broadcast(value: Any) -> list[Any]:
    """[what rank 0 has], on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, 0)
    return values
