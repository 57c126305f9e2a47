"""torch's distributed checkpoint (DCP) with our rule of who holds what, and without pickles on disk.

DCP runs the ranks: it gathers their plans on one, scatters the decisions, and lets every rank fail where one does.
Three of its parts are replaced, through its public interfaces, because

- its own planners take a shard for one box, and refuse fused q, k, v weights, whose shard is several;
- its file format keeps its index as a pickle, and reading a pickle runs whatever code it names;
- its writer for safetensors keeps one piece a tensor and rank, and holds all of them in memory while it writes.

The planners work with DCP's own storage too: ``dcp.save(tensors, checkpoint_id=…, planner=PieceSavePlanner())``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwright.checkpoint.boxes import Box, held_pieces
from shardwright.errors import InputError


class PieceSavePlanner(SavePlanner):
    """Every rank offers the pieces that it holds; of equal ones the rank that writes least so far writes its own."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """state_dict: name → DTensor or plain tensor, the same names on every rank."""
        self._tensors: dict[str, torch.Tensor] = dict(state_dict)
        self._views: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One item for each piece that this rank holds."""
        items = []
        for name, tensor in self._tensors.items():
            for box, view in held_pieces(tensor):
                chunk = chunk_of(box)
                self._views[name, chunk.offsets] = view
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.shape)
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data={name: (t.dtype, t.shape) for name, t in self._tensors.items()})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each piece once, spread over the ranks that hold it."""
        kinds: dict[str, tuple[torch.dtype, torch.Size]] = all_plans[0].planner_data
        if any(plan.planner_data != kinds for plan in all_plans):
            raise RuntimeError("the ranks do not save the same tensors")
        holders: dict[MetadataIndex, list[tuple[int, WriteItem]]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append((rank, item))
        written: list[list[WriteItem]] = [[] for _ in all_plans]
        load = [0] * len(all_plans)
        found = {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [])
            for name, (dtype, shape) in kinds.items()
        }
        for offers in sorted(holders.values(), key=lambda offers: -_bytes(offers[0][1])):  # large ones first
            rank, item = min(offers, key=lambda offer: load[offer[0]])
            assert item.tensor_data is not None
            written[rank].append(item)
            load[rank] += _bytes(item)
            found[item.index.fqn].chunks.append(item.tensor_data.chunk)
        for name, tensor in found.items():
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise RuntimeError(f"{name}: the pieces that ranks hold do not make the whole")
        return [SavePlan(items) for items in written], Metadata(dict(found))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as decided."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of a piece: a view."""
        return self._views[write_item.index.fqn, cast(torch.Size, write_item.index.offset)]


class PieceLoadPlanner(LoadPlanner):
    """Fills the tensors of ``state_dict`` in place: of every piece that this rank holds, what each saved one covers."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """state_dict: name → DTensor or plain tensor, each of the saved shape."""
        assert metadata is not None
        self._tensors: dict[str, torch.Tensor] = dict(state_dict)
        self._saved = metadata.state_dict_metadata
        self._views: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """One item for each pair of a piece that is wanted and a saved one that overlaps it."""
        items: list[ReadItem] = []
        for name, tensor in self._tensors.items():
            saved = self._saved.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != tensor.shape:
                raise InputError(f"{name}: found no such tensor of {list(tensor.shape)}; allowed: one that was saved")
            chunks = []
            for box, view in held_pieces(tensor):
                chunks.append(chunk_of(box))
                self._views[name, chunks[-1].offsets] = view
            found = create_read_items_for_chunk_list(name, saved, chunks)
            if sum(item.lengths.numel() for item in found) != sum(chunk.sizes.numel() for chunk in chunks):
                raise InputError(
                    f"{name}: found saved pieces with gaps or overlaps; allowed: pieces that make the whole"
                )
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads what it planned."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the values of an item go: a view of the tensor that is filled."""
        view = self._views[read_item.dest_index.fqn, cast(torch.Size, read_item.dest_index.offset)]
        return view[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the view is the place."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: everything is a tensor."""
        raise AssertionError("only tensors are loaded")


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
