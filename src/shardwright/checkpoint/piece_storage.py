"""The storage of our checkpoints behind torch's DCP: a manifest in JSON, and safetensors files of pieces. No pickle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.dcp import chunk_of
from shardwright.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    RunState,
    SavedPiece,
    SavedTensor,
    is_whole,
    piece_name,
)
from shardwright.checkpoint.tensor_file import (
    DTYPES,
    NAMES,
    TensorWriter,
    kind_of,
    open_tensors,
    read_box,
    sync_directory,
)
from shardwright.errors import InputError


class ManifestWriter(StorageWriter):
    """Writes a checkpoint beside ``target`` and moves it there when it is whole.

    Each rank writes one file, a piece at a time. When all are on disk the coordinator writes the manifest, then renames
    the directory. Whoever is killed before that leaves a hidden directory, which the next save removes.
    All ranks see one file system. Raises InputError where it cannot be written.
    """

    def __init__(self, target: Path, state: RunState, dropout: Mapping[str, int]):
        self._target, self._state, self._dropout = target, state, dict(dropout)
        self._temporary = temporary_of(target)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing before all ranks have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before anybody writes: an empty directory, and a file name for each rank."""
        if is_whole(self._target):
            raise InputError(f"{self._target}: found a checkpoint; allowed: a path where there is none yet")
        try:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(self._temporary, error) from None
        return [SavePlan(plan.items, f"pieces-{rank:05}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file; nothing where it has no pieces."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        named = {_piece_of(item): item for item in plan.items}
        kinds = {}
        for name, item in named.items():
            assert item.tensor_data is not None
            kinds[name] = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
        file: str = plan.storage_data
        try:
            with TensorWriter(self._temporary / file, kinds) as writer:
                for name, item in named.items():
                    writer.write(name, cast(torch.Tensor, planner.resolve_data(item)))
        except OSError as error:
            raise _unwritable(self._temporary / file, error) from None
        done.set_result([WriteResult(item.index, writer.size, file) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when every file is on disk: the manifest, then the name."""
        manifest = self._manifest(metadata, [result for each in results for result in each])
        try:
            with open(self._temporary / MANIFEST, "w", encoding="utf-8") as file:
                file.write(manifest.text())
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self._temporary)
            if self._target.exists():  # not whole, as was seen before
                shutil.rmtree(self._target)
            os.rename(self._temporary, self._target)
            sync_directory(self._target.parent)
        except OSError as error:
            raise _unwritable(self._target, error) from None

    def _manifest(self, metadata: Metadata, results: list[WriteResult]) -> Manifest:
        files = {(result.index.fqn, result.index.offset): result.storage_data for result in results}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = [
                SavedPiece(offsets=[*chunk.offsets], shape=[*chunk.sizes], file=files[name, chunk.offsets])
                for chunk in tensor.chunks
            ]
            tensors[name] = SavedTensor(dtype=NAMES[tensor.properties.dtype], shape=[*tensor.size], pieces=pieces)
        sizes = dict(sorted({result.storage_data: result.size_in_bytes for result in results}.items()))
        return Manifest(version=1, state=self._state, dropout=self._dropout, files=sizes, tensors=tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by a path alone."""
        return False


class ManifestReader(StorageReader):
    """Reads a checkpoint that ``ManifestWriter`` wrote: the manifest, then boxes of safetensors files."""

    def __init__(self, checkpoint: Path, manifest: Manifest | None = None):
        self._checkpoint = checkpoint
        self._manifest = manifest or Manifest.load(checkpoint)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[tensor.dtype]),
                    torch.Size(tensor.shape),
                    [chunk_of(piece.box) for piece in tensor.pieces],
                )
                for name, tensor in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is prepared."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """File after file, box after box."""
        by_file: dict[str, list[tuple[ReadItem, Box]]] = {}
        pieces = {
            (name, torch.Size(piece.offsets)): piece
            for name, tensor in self._manifest.tensors.items()
            for piece in tensor.pieces
        }
        for item in plan.items:
            piece = pieces[item.storage_index.fqn, cast(torch.Size, item.storage_index.offset)]
            by_file.setdefault(piece.file, []).append((item, piece.box))
        for name, items in sorted(by_file.items()):
            with open_tensors(self._checkpoint / name) as file:
                here = set(file.keys())
                for item, box in items:
                    self._read(file, here, self._checkpoint / name, item, box, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, here: set[str], path: Path, item: ReadItem, saved: Box, planner: LoadPlanner) -> None:
        name = piece_name(item.storage_index.fqn, saved)
        told = DTYPES[self._manifest.tensors[item.storage_index.fqn].dtype], saved.shape
        if name not in here or kind_of(file, name) != told:
            raise InputError(
                f"{path}: {name}: found nothing of {told[0]} {list(told[1])}; allowed: what the manifest tells"
            )
        place = planner.resolve_tensor(item)
        place.copy_(read_box(file, name, Box(tuple(item.storage_offsets), tuple(item.lengths))))
        planner.commit_tensor(item, place)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by a path alone."""
        return False


def temporary_of(target: Path) -> Path:
    """The hidden directory in which a checkpoint is made (or unmade)."""
    return target.with_name(f".{target.name}.tmp")


def _piece_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return piece_name(item.index.fqn, Box(tuple(chunk.offsets), tuple(chunk.sizes)))


def _unwritable(path: Path, error: OSError) -> InputError:
    found = (error.strerror or type(error).__name__).lower()
    return InputError(f"{path}: found {found}; allowed: a path in a writable directory with room")
