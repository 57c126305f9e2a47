"""Checkpoints across layouts and numbers of ranks (ACCEPTANCE F2)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright as sw
from shardwright.checkpoint.dcp import PieceLoadPlanner, PieceSavePlanner
from shardwright.checkpoint.export import save_pretrained
from shardwright.checkpoint.manifest import MANIFEST, Manifest, RunState
from shardwright.checkpoint.names import named_tensors
from shardwright.checkpoint.pretrained import from_safetensors
from shardwright.checkpoint.training_state import MOMENTS, latest, load, save
from shardwright.layers.dropout import GridDropout
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.spec.plan import Plan
from shardwright.values.placement import cut_of, make_parameter
from support import dense, tiny
from support.marks import slow_in
from support.ranks import on_ranks
from test_families import path_of

Values = dict[str, numpy.ndarray]

ODD = {"vocab_size": 241, "intermediate_size": 146}
MODELS: dict[str, tuple[Path, str, str]] = {
    # config, element type, how parameters are stored when they are saved
    "odd llama": (path_of("llama", num_key_value_heads=12, **ODD), "float32", "replicate"),  # tied
    # In float32 the gradient of the keys' bias, zero in truth, is noise that Adam would make a step of.
    "gpt2 with dropout": (path_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1), "float64", "parameters"),
}
SAVED = {"data": 2, "tensor": 2}
OTHERS: list[tuple[dict[str, int], str, str]] = [
    ({"data": 1, "tensor": 1}, "replicate", "replicate"),
    ({"data": 1, "tensor": 2}, "tensor-all-reduce", "replicate"),
    ({"data": 1, "tensor": 3}, "sequence-parallel-keep", "replicate"),
    ({"data": 3, "tensor": 1}, "replicate", "gradients"),
    ({"data": 2, "tensor": 2}, "sequence-parallel", "optimizer"),
    ({"data": 1, "tensor": 4}, "sequence-parallel", "replicate"),
]


def wholes(tensors: dict[str, torch.Tensor]) -> Values:
    """What all ranks hold together, on rank 0 (elsewhere nothing), where copies must agree.

    Each element goes where the cut of a tensor of indices says that it belongs. torch's own ``full_tensor`` cannot undo
    a fused cut that is cut again.
    """
    mine = {name: (places(tensor), local(tensor).detach().clone().numpy()) for name, tensor in tensors.items()}
    everybody: list[Any] = [mine]
    if dist.is_initialized():
        everybody = [None] * dist.get_world_size()
        dist.gather_object(mine, everybody if dist.get_rank() == 0 else None)
        if dist.get_rank():
            return {}
    found = {}
    for name, tensor in tensors.items():
        whole = numpy.empty(tensor.numel(), mine[name][1].dtype)
        for where, values in (held[name] for held in everybody):
            whole[where] = values.reshape(-1)
        assert all(
            numpy.array_equal(whole[where], values.reshape(-1)) for where, values in (h[name] for h in everybody)
        )
        assert len(numpy.unique(numpy.concatenate([held[name][0] for held in everybody]))) == tensor.numel()
        found[name] = whole.reshape(tensor.shape)
    return found


def places(tensor: torch.Tensor) -> numpy.ndarray:
    """The index of each local element in the row-major whole."""
    index = torch.arange(tensor.numel()).view(tensor.shape)
    if isinstance(tensor, DTensor):
        index = cut_of(tensor.shape, tensor.device_mesh, tensor.placements).of(index)
    return index.reshape(-1).numpy()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def everything(model: nn.Module, optimizer: Any) -> Values:
    """Parameters, moments and dropout counters."""
    tensors = dict(model.named_parameters())
    moments = {
        f"{name} {moment}": optimizer.state[parameter][moment]
        for name, parameter in tensors.items()
        for moment in MOMENTS
    }
    calls = {name: numpy.array(m.calls) for name, m in model.named_modules() if isinstance(m, GridDropout)}
    return wholes(tensors | moments) | calls


def same(a: Values, b: Values) -> bool:
    return a.keys() == b.keys() and all(numpy.array_equal(a[name], b[name]) for name in a)


def train_and_save(plan: Plan, path: Path, directory: Path) -> tuple[Values, float, Values]:
    """What is saved after two steps; the loss of the third step and what it leaves."""
    model, mesh = tiny.build(plan, path)
    step = sw.TrainStep(model, mesh, plan, learning_rate=3e-3)
    data = tiny.batches(plan, 3, mesh.get_local_rank("data"))
    for micro in data[:2]:
        step(micro)
    save(directory, model, step.optimizer, RunState(step=2, seed=5))
    saved = everything(model, step.optimizer)
    loss = step(data[2]).item()
    return saved, loss, everything(model, step.optimizer)


def load_and_train(plan: Plan, path: Path, directory: Path) -> tuple[Values, float, Values]:
    """What is loaded, into a model that was at work already; the loss of the next step and what it leaves."""
    model, mesh = tiny.build(plan, path)
    step = sw.TrainStep(model, mesh, plan, learning_rate=3e-3)
    data = tiny.batches(plan, 3, mesh.get_local_rank("data"))
    step(data[1])
    step.evaluate(data[1])  # what it has gathered is stale after the load
    found = latest(directory)
    assert found is not None
    assert load(found, model, step.optimizer) == RunState(step=2, seed=5)
    loaded = everything(model, step.optimizer)
    loss = step(data[2]).item()
    return loaded, loss, everything(model, step.optimizer)


@pytest.mark.parametrize("name", slow_in(["odd llama"], MODELS))
def test_f2_parameters_and_moments_bitwise_and_the_next_step(name: str, tmp_path: Path) -> None:
    path, dtype, level = MODELS[name]
    plan = tiny.plan_of(SAVED, "sequence-parallel", path, dtype=dtype, params={"*": level})
    saved, loss, after = on_ranks(4, train_and_save, plan, path, tmp_path)[0]
    assert name != "gpt2 with dropout" or any("dropout" in key and value == 2 for key, value in saved.items())
    ran = on_ranks(4, load_and_train, plan, path, tmp_path)
    loaded, _, next_after = ran[0]
    assert same(loaded, saved) and same(next_after, after) and [each[1] for each in ran] == [loss] * 4
    for axes, layout, level in OTHERS:
        plan = tiny.plan_of(axes, layout, path, dtype=dtype, params={"*": level})
        ran = on_ranks(plan.world_size, load_and_train, plan, path, tmp_path)
        loaded, _, next_after = ran[0]
        assert same(loaded, saved), (axes, layout)
        assert [each[1] for each in ran] == pytest.approx([loss] * len(ran), rel=1e-6)
        for key, value in after.items():
            apart = numpy.linalg.norm(next_after[key] - value)
            assert apart <= 1e-6 * numpy.linalg.norm(value), (axes, layout, key)


# Any tensor, any cut

ZOO: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((2, 6), torch.float32),  # four ranks hold 1, 1, 0, 0 rows
    "rows": ((7, 3), torch.float64),
    "twice": ((11, 5), torch.bfloat16),
    "both": ((5, 9), torch.float32),
    "fused": ((15, 4), torch.float32),
    "fused_columns": ((3, 24), torch.float32),
    "fused_empty": ((6, 2), torch.float32),
    "fused_and_rows": ((13, 2), torch.float32),
    "whole": ((4, 4), torch.float16),
    "scalar": ((), torch.float32),
    "nothing": ((0, 5), torch.float32),
}
CUTS: dict[str, list[Placement]] = {
    # on the axes a × b
    "w": [Shard(0), Shard(0)],
    "rows": [Replicate(), Shard(0)],
    "twice": [Shard(0), Shard(0)],
    "both": [Shard(1), Shard(0)],
    "fused": [Replicate(), _StridedShard(0, split_factor=3)],
    "fused_columns": [Shard(0), _StridedShard(1, split_factor=3)],
    "fused_empty": [_StridedShard(0, split_factor=3), Replicate()],
    "fused_and_rows": [Shard(0), Shard(0)],
    "whole": [Replicate(), Replicate()],
    "scalar": [Replicate(), Replicate()],
    "nothing": [Shard(0), Shard(1)],
}


def zoo_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in ZOO.items()}


def zoo(axes: dict[str, int], permuted: bool, filled: bool) -> nn.Module:
    """The zoo, cut over a × b (or the same ranks as a mesh b × a), and a buffer that is whole everywhere."""
    mesh: DeviceMesh = dense.mesh_of(**axes)
    if permuted:
        mesh = DeviceMesh("cpu", mesh.mesh.t(), mesh_dim_names=("b", "a"))
    module = nn.Module()
    for name, whole in zoo_values().items():
        cut = cut_of(whole.shape, mesh, CUTS[name])
        local = cut.of(whole) if filled else torch.full(cut.local_shape, -9.0, dtype=whole.dtype)
        module.register_parameter(name, make_parameter(local, whole.shape, mesh, CUTS[name]))
    module.register_buffer("counts", torch.arange(5) if filled else torch.zeros(5, dtype=torch.int64))
    return module


def save_zoo(axes: dict[str, int], permuted: bool, directory: Path) -> None:
    save(directory, zoo(axes, permuted, True), None, RunState(step=1))


def load_zoo(axes: dict[str, int], permuted: bool, directory: Path) -> list[str]:
    """Names of what did not come back as it was."""
    module = zoo(axes, permuted, False)
    path = latest(directory)
    assert path is not None
    load(path, module)
    expected = zoo(axes, permuted, True)
    return [
        name
        for name, tensor in named_tensors(expected).items()
        if not torch.equal(local(tensor), local(named_tensors(module)[name]))
    ]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("axes", [{"a": 2, "b": 2}, {"a": 1, "b": 4}])
def test_uneven_empty_and_fused_shards_come_back_on_fewer_ranks(
    axes: dict[str, int], permuted: bool, tmp_path: Path
) -> None:
    """w [2,6] over four ranks among them (rows 1, 1, 0, 0)."""
    on_ranks(4, save_zoo, axes, permuted, tmp_path)
    for others in ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 3}, {"a": 4, "b": 1}, axes):
        for way in (False, True):
            ranks = others["a"] * others["b"]
            assert on_ranks(ranks, load_zoo, others, way, tmp_path) == [[]] * ranks, (others, way)


def test_what_ranks_share_is_written_once_and_by_all_of_them(tmp_path: Path) -> None:
    path = tiny.config_path()
    on_ranks(4, train_and_save, tiny.plan_of({"data": 4, "tensor": 1}, "replicate"), path, tmp_path)
    manifest = Manifest.load(tmp_path / "step-00000002")
    elements = sum(p.numel() for p in build_meta(load_config(path)).parameters())
    sizes = list(manifest.files.values())
    assert len(sizes) == 4 and max(sizes) < 1.1 * min(sizes)
    headers = 200 * len(manifest.tensors)
    assert 0 < sum(sizes) - 3 * 4 * elements < headers
    assert sorted(os.listdir(tmp_path / "step-00000002")) == sorted([MANIFEST, *manifest.files])  # and no pickle


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operator made; views of what is there (or of a file) are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and not each.is_meta]
        if all(returned.alias_info is None for returned in func._schema.returns):
            self.bytes = max([self.bytes, *(local(tensor).nbytes for tensor in made)])
        return result


def largest_tensors(directory: Path, path: Path) -> tuple[int, int, int, int, int]:
    """Bytes of the largest shard; of the largest tensor made in saving, loading, exporting and importing."""
    plan = tiny.plan_of({"data": 1, "tensor": 4}, "sequence-parallel", path)
    model, mesh = tiny.build(plan, path)
    seen = [max(parameter._local_tensor.nbytes for parameter in model.parameters())]
    with Largest() as largest:
        found = save(directory, model, None, RunState(step=1))
    seen.append(largest.bytes)
    with Largest() as largest:
        load(found, model)
    seen.append(largest.bytes)
    with Largest() as largest:
        save_pretrained(model, directory / "out", shard_bytes=60_000)
    seen.append(largest.bytes)
    dense_model = build_meta(load_config(path))
    with Largest() as largest:
        source = from_safetensors(directory / "out", {m: name for name, m in dense_model.named_modules()})
        sw.parallelize(dense_model, mesh, plan, source)
    seen.append(largest.bytes)
    return tuple(seen)  # type: ignore[return-value]


def test_no_rank_holds_more_than_its_shard_and_rank_0_one_tensor_when_exporting(tmp_path: Path) -> None:
    path = tiny.config_path()
    whole = tiny.FIELDS["vocab_size"] * tiny.FIELDS["hidden_size"] * 4
    for rank, (shard, saving, loading, exporting, importing) in enumerate(on_ranks(4, largest_tensors, tmp_path, path)):
        assert max(saving, loading, importing) <= shard, (saving, loading, importing)
        assert exporting <= (shard if rank else whole)


# torch's own distributed checkpoint


def dcp_save(plan: Plan, path: Path, directory: Path, planner: bool) -> Values:
    model, _ = tiny.build(plan, path)
    dcp.save(get_model_state_dict(model), checkpoint_id=directory, planner=PieceSavePlanner() if planner else None)
    return wholes(dict(model.named_parameters()))


def dcp_load(plan: Plan, path: Path, directory: Path, planner: bool) -> Values:
    model, _ = tiny.build(plan, path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.fill_(torch.nan)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=directory, planner=PieceLoadPlanner() if planner else None)
    model.load_state_dict(state)
    return wholes(dict(model.named_parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_f2_torchs_own_dcp_works_on_the_state_dict(name: str, tmp_path: Path) -> None:
    """As it is, but for the shards of fused weights, which are no box: those take our planners."""
    path = MODELS[name][0]
    planner = name != "odd llama"
    saved = on_ranks(4, dcp_save, tiny.plan_of(SAVED, "sequence-parallel", path), path, tmp_path, planner)[0]
    for axes, layout, _ in OTHERS[:3]:
        plan = tiny.plan_of(axes, layout, path)
        assert same(on_ranks(plan.world_size, dcp_load, plan, path, tmp_path, planner)[0], saved)
