"""Checkpoints: the parameters of a model, the moments of its optimizer and where the run stands, whatever the layout.

Tensors go by their Hugging Face state-dict names, and are cut into boxes of the whole. So what one layout and number of
ranks has saved, any other loads; a tied weight is saved once. A checkpoint appears whole or not at all, and nothing in
it is a pickle. No rank holds more of a tensor than its own part of it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from shardwright.checkpoint.dcp import PieceLoadPlanner, PieceSavePlanner
from shardwright.checkpoint.manifest import Manifest, RunState, is_whole
from shardwright.checkpoint.names import named_tensors
from shardwright.checkpoint.piece_storage import ManifestReader, ManifestWriter, temporary_of
from shardwright.checkpoint.tensor_file import DTYPES
from shardwright.errors import InputError
from shardwright.layers.dropout import ForwardDraws, GridDropout
from shardwright.step.train_step import FusedAdamW

_log = logging.getLogger(__name__)

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What the optimizer keeps of a parameter that it has updated."""


def save(
    directory: Path,
    model: nn.Module,
    optimizer: FusedAdamW | None,
    state: RunState,
    keep: int | None = None,
) -> Path:
    """Writes the checkpoint of step ``state.step`` into ``directory``, on all ranks together; returns its path.

    keep: how many of the newest whole checkpoints stay there; None: all. Raises InputError, on every rank, where the
    directory cannot be written or holds a whole checkpoint of that step; older ones are then as they were.
    """
    target = directory / f"step-{state.step:08}"
    writer = ManifestWriter(target, state, {name: layer.calls for name, layer in _dropouts(model)})
    with torch.no_grad(), _one_line():
        _dcp("save", _tensors(model, optimizer), storage_writer=writer, planner=PieceSavePlanner())
    if keep is not None and _rank() == 0:
        _remove_old(directory, target, keep)
    _log.info("saved step %d to %s", state.step, target)
    return target


def load(path: Path, model: nn.Module, optimizer: FusedAdamW | None = None) -> RunState:
    """Fills ``model`` (and ``optimizer``) in place from the checkpoint at ``path``, on all ranks together.

    Returns where the run stood. Values are the saved ones bit for bit, moments included; the counters of dropout layers
    are set. Raises InputError, on every rank, before anything is changed where the checkpoint is not whole or is of
    another model: the line names the tensor.
    """
    manifest = Manifest.load(path)
    _check(path, manifest, "model", named_tensors(model))
    if optimizer is not None:
        _make_state(path, manifest, model, optimizer)
    with torch.no_grad(), _one_line():
        reader = ManifestReader(path, manifest)
        _dcp("load", _tensors(model, optimizer), storage_reader=reader, planner=PieceLoadPlanner())
    for name, layer in _dropouts(model):
        layer.calls = manifest.dropout.get(name, 0)
    _log.info("loaded step %d from %s", manifest.state.step, path)
    return manifest.state


def latest(directory: Path) -> Path | None:
    """The whole checkpoint of the most steps in ``directory``; None where there is none.

    What is not whole is passed over. Raises InputError where ``directory`` is something else.
    """
    return next(iter(_whole(directory)), None)


def _whole(directory: Path) -> Iterator[Path]:
    """The whole checkpoints, the newest first."""
    try:
        found = [path for path in directory.iterdir() if re.fullmatch(r"step-[0-9]{8,}", path.name)]
    except FileNotFoundError:
        return
    except OSError as error:
        found_text = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{directory}: found {found_text}; allowed: a directory of checkpoints") from None
    for path in sorted(found, key=lambda path: int(path.name[5:]), reverse=True):
        if is_whole(path):
            yield path


def _remove_old(directory: Path, newest: Path, keep: int) -> None:
    """Leaves the newest ``keep`` whole checkpoints, and no half of one. What cannot be removed stays."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list(_whole(directory))[max(keep, 1) :]:
        if path != newest:
            try:
                os.rename(path, temporary_of(path))  # it is never half there under its name
            except OSError:
                continue
            shutil.rmtree(temporary_of(path), ignore_errors=True)


# Names


def _dropouts(model: nn.Module) -> list[tuple[str, GridDropout | ForwardDraws]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, (GridDropout, ForwardDraws))]


def _tensors(model: nn.Module, optimizer: FusedAdamW | None) -> dict[str, Any]:
    """All that a checkpoint holds, by the names that it goes by there."""
    named = named_tensors(model)
    found = {f"model.{name}": tensor for name, tensor in named.items()}
    if optimizer is not None:
        for name, tensor in named.items():
            if tensor in optimizer.state:
                found |= {f"optimizer.{name}.{moment}": optimizer.state[tensor][moment] for moment in MOMENTS}
    return found


def _make_state(path: Path, manifest: Manifest, model: nn.Module, optimizer: FusedAdamW) -> None:
    """Gives the optimizer memory for exactly the moments that were saved, once they are seen to fit."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held = {name: tensor for name, tensor in named_tensors(model).items() if id(tensor) in updated}
    saved = {
        key.rpartition(".")[0].removeprefix("optimizer.") for key in manifest.tensors if key.startswith("optimizer.")
    }
    if manifest.state.step and not saved:
        raise InputError(f"{path}: optimizer: found no moments; allowed: a checkpoint that was saved with an optimizer")
    scalar = torch.zeros((), dtype=torch.float32)
    wanted = {
        f"{name}.{moment}": scalar if moment == "step" else tensor
        for name, tensor in held.items()
        if name in saved
        for moment in MOMENTS
    }
    _check(path, manifest, "optimizer", wanted)
    for name, tensor in held.items():
        optimizer.state.pop(tensor, None)
        if name in saved:
            optimizer._state_of(tensor)  # type: ignore[arg-type]


def _check(path: Path, manifest: Manifest, part: str, wanted: dict[str, torch.Tensor]) -> None:
    """InputError for the first tensor of ``part`` that is missing, surplus, or of another shape or element type."""
    saved = {key: tensor for key, tensor in manifest.tensors.items() if key.startswith(f"{part}.")}
    for name, tensor in wanted.items():
        key = f"{part}.{name}"
        if key not in saved:
            raise InputError(
                f"{path}: {key}: found nothing of that name; allowed: all {len(wanted)} tensors of the {part}"
            )
        found = saved[key].shape, DTYPES[saved[key].dtype]
        allowed = list(tensor.shape), tensor.dtype
        if found != allowed:
            raise InputError(f"{path}: {key}: found {_kind(*found)}; allowed: {_kind(*allowed)}, as the model has it")
        del saved[key]
    for key in saved:
        raise InputError(f"{path}: {key}: found a tensor of another model; allowed: the {len(wanted)} of this {part}")


def _kind(shape: list[int], dtype: torch.dtype) -> str:
    return f"{shape} of {str(dtype).removeprefix('torch.')}"


# DCP


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _dcp(action: str, tensors: dict[str, Any], **parts: Any) -> None:
    import torch.distributed.checkpoint as dcp

    call: Callable[..., Any] = getattr(dcp, action)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process alone is meant
        call(tensors, no_dist=not torch.distributed.is_initialized(), **parts)


@contextmanager
def _one_line() -> Iterator[None]:
    """What failed on some rank, as it was raised there; DCP wraps it."""
    try:
        yield
    except CheckpointException as failure:
        errors = [error for _, (error, _) in sorted(failure.failures.items())]
        raise next((error for error in errors if isinstance(error, InputError)), errors[0]) from None
