"""Checkpoints across layouts and numbers of ranks, Hugging Face directories in and out (ACCEPTANCE F2, F3, F4)."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
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

import dense
import shardwright as sw
import tiny
from ranks import on_ranks
from shardwright import models
from shardwright._errors import InputError
from shardwright._plan import Plan
from shardwright.models.export import save_pretrained
from shardwright.models.names import named_tensors
from shardwright.params import cut_of, make_parameter
from shardwright.params.pretrained import from_safetensors
from shardwright.params.tensor_file import TensorWriter
from shardwright.train import checkpoint
from shardwright.train.checkpoint import MOMENTS, latest, load, save
from shardwright.train.data import standard_library_text
from shardwright.train.dcp import PieceLoadPlanner, PieceSavePlanner
from shardwright.train.loop import METRICS, train
from shardwright.train.manifest import MANIFEST, Manifest, RunState
from shardwright.train.metrics import MetricsWriter, forget_metrics_after, read_metrics
from shardwright.train.sources import documents
from test_families import path_of
from test_train import VOCAB, prepare

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
    calls = {name: numpy.array(m.calls) for name, m in model.named_modules() if isinstance(m, sw.layers.GridDropout)}
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


@pytest.mark.parametrize("name", MODELS)
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
    elements = sum(p.numel() for p in models.build_meta(models.load_config(path)).parameters())
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
    dense_model = models.build_meta(models.load_config(path))
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


# Kills


def plain(value: float) -> nn.Module:
    """A model without a mesh, in this process alone."""
    module = nn.Linear(3, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def value_in(path: Path) -> float:
    module = plain(torch.nan)
    state = load(path, module)
    (value,) = {*module.weight.flatten().tolist(), *module.bias.tolist()}  # type: ignore[operator]
    assert value == state.step
    return value


def killed_at(place: int, work: Callable[[], object]) -> bool:
    """Runs ``work`` in another process, which dies before its ``place``-th step on the disk; whether it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    left = [place]

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(1)
            left[0] -= 1
            return step(*args, **kwargs)

        return do

    for holder, name in ((os, "fsync"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (TensorWriter, "write")):
        setattr(holder, name, counted(getattr(holder, name)))
    try:
        work()
    finally:
        os._exit(0)


def test_a_save_that_is_killed_anywhere_leaves_a_whole_checkpoint_and_no_half(tmp_path: Path) -> None:
    place, seen = 0, set()
    while True:
        directory = tmp_path / str(place)
        save(directory, plain(1), None, RunState(step=1))
        killed = killed_at(place, lambda: save(directory, plain(2), None, RunState(step=2), keep=1))  # noqa: B023
        left = latest(directory)
        assert left is not None
        seen.add((value_in(left), (directory / "step-00000001").exists()))
        for path in directory.glob("step-*"):
            assert value_in(path) in (1, 2)
        assert value_in(save(directory, plain(3), None, RunState(step=3), keep=1)) == 3
        assert os.listdir(directory) == ["step-00000003"]  # what was left behind is gone
        if not killed:
            break
        place += 1
    assert place > 8 and seen == {(1, True), (2, True), (2, False)}


def forked(world: int, work: Callable[[int], object]) -> list[int]:
    """Runs ``work(rank)`` on ranks of its own, outside the pools; their exit codes."""
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            code: Any = 3
            try:
                work(rank)
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def die_while_writing(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    if rank == 1:
        TensorWriter.write = lambda *_: os._exit(1)  # type: ignore[method-assign]
    try:
        save(directory, zoo({"a": 2, "b": 1}, False, True), None, RunState(step=2))
    except RuntimeError:  # gloo's: the other is gone
        os._exit(2)


def test_f4_a_rank_that_dies_in_mid_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    on_ranks(4, save_zoo, {"a": 2, "b": 2}, False, tmp_path)
    assert forked(2, lambda rank: die_while_writing(rank, tmp_path)) == [2, 1]
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert on_ranks(2, load_zoo, {"a": 2, "b": 1}, False, tmp_path) == [[], []]


def test_the_newest_whole_checkpoint_is_found_and_the_newest_are_kept(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    for step in (1, 2, 9, 10):
        save(tmp_path, plain(step), None, RunState(step=step), keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000009", "step-00000010"]
    for step, name in ((10, "pieces-00000.safetensors"), (9, MANIFEST)):
        found = latest(tmp_path)
        assert found is not None and value_in(found) == step
        os.truncate(found / name, (found / name).stat().st_size - 1)
    found = latest(tmp_path)
    assert found is not None and value_in(found) == 2
    save(tmp_path, plain(9), None, RunState(step=9))  # takes the place of what is not whole
    assert latest(tmp_path) == tmp_path / "step-00000009"
    with pytest.raises(InputError, match="found a checkpoint; allowed: a path where there is none yet"):
        save(tmp_path, plain(9), None, RunState(step=9))


# Bad input


def spoil_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    (path / MANIFEST).write_text(json.dumps(data))


def narrower() -> nn.Module:
    return nn.Linear(3, 5)


SPOILT: list[tuple[Callable[[Path], object], Callable[[], nn.Module], str]] = [
    (shutil.rmtree, lambda: plain(0), "step-00000001: found no manifest.json; allowed: a whole checkpoint"),
    (
        lambda path: (path / "pieces-00000.safetensors").unlink(),
        lambda: plain(0),
        "pieces-00000.safetensors: found no such file; allowed: the ",
    ),
    (
        lambda path: os.truncate(path / "pieces-00000.safetensors", 100),
        lambda: plain(0),
        "pieces-00000.safetensors: found 100 bytes; allowed: the ",
    ),
    (
        lambda path: (path / "pieces-00000.safetensors").write_bytes(
            bytes((path / "pieces-00000.safetensors").stat().st_size)
        ),
        lambda: plain(0),
        "pieces-00000.safetensors: found ",
    ),
    (lambda path: None, narrower, "model.weight: found [4, 3] of float32; allowed: [5, 3] of float32, as the model"),
    (lambda path: None, lambda: plain(0).double(), "model.weight: found [4, 3] of float32; allowed: [4, 3] of float64"),
    (lambda path: None, lambda: nn.Sequential(plain(0)), "model.0.weight: found nothing of that name; allowed: all 2"),
    (lambda path: None, lambda: nn.Linear(3, 4, bias=False), "model.bias: found a tensor of another model; allowed"),
    (
        lambda path: spoil_manifest(path, lambda data: data.update(version=2)),
        lambda: plain(0),
        "manifest.json: version: found 2; allowed: 1",
    ),
    (
        lambda path: spoil_manifest(path, lambda data: data["tensors"]["model.bias"]["pieces"][0].update(file="../x")),
        lambda: plain(0),
        "manifest.json: tensors.model.bias.pieces[0].file: found '../x'; allowed",
    ),
    (
        lambda path: spoil_manifest(path, lambda data: data["tensors"]["model.bias"]["pieces"].clear()),
        lambda: plain(0),
        "tensors.model.bias.pieces: found 0 elements; allowed: the 4 of [4], each once",
    ),
    (
        lambda path: spoil_manifest(path, lambda data: data["tensors"]["model.bias"]["pieces"][0].update(offsets=[1])),
        lambda: plain(0),
        "tensors.model.bias.pieces[0]: found [4] at [1]; allowed: a box of [4]",
    ),
    (
        lambda path: spoil_manifest(
            path,
            lambda data: data["tensors"].update(
                {"model.bias": {**data["tensors"]["model.bias"], "shape": [3, 4], "dtype": "F32", "pieces": [
                    {**data["tensors"]["model.bias"]["pieces"][0], "offsets": [0, 0], "shape": [3, 4]}]}}
            ),
        ),
        lambda: _Named(bias=torch.zeros(3, 4), weight=torch.zeros(4, 3)),
        "pieces-00000.safetensors: model.bias[0:3,0:4]: found nothing of torch.float32 [3, 4]; allowed",
    ),
]  # fmt: skip


class _Named(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


@pytest.mark.parametrize("case", range(len(SPOILT)))
def test_a_bad_checkpoint_is_one_line_that_names_the_key(case: int, tmp_path: Path) -> None:
    spoil, model, line = SPOILT[case]
    path = save(tmp_path, plain(1), None, RunState(step=1))
    spoil(path)
    module = model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load(path, module)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    if "found nothing of torch" not in line:
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_an_optimizer_wants_the_moments_of_its_own_parameters(tmp_path: Path) -> None:
    module = plain(1)
    optimizer = sw.step.FusedAdamW(module.parameters())
    bare = save(tmp_path, module, None, RunState(step=1))
    with pytest.raises(InputError, match="optimizer: found no moments; allowed: a checkpoint that was saved with an"):
        load(bare, module, optimizer)
    module.weight.grad = torch.ones(4, 3)  # the bias has no gradient, and so no moments
    optimizer.step()
    path = save(tmp_path, module, optimizer, RunState(step=2))
    other = plain(0)
    resumed = sw.step.FusedAdamW(other.parameters())
    other.bias.grad = torch.ones(4)
    resumed.step()
    load(path, other, resumed)
    assert other.bias not in resumed.state
    assert same(
        *({moment: each.state[owner][moment].numpy() for moment in MOMENTS} for each, owner in (
            (optimizer, module.weight), (resumed, other.weight)))
    )  # fmt: skip
    frozen = sw.step.FusedAdamW([other.bias])
    with pytest.raises(InputError, match=r"optimizer\.weight\.step: found a tensor of another model"):
        load(path, other, frozen)
    spoil_manifest(path, lambda data: data["tensors"].pop("optimizer.weight.exp_avg"))
    with pytest.raises(InputError, match=r"optimizer\.weight\.exp_avg: found nothing of that name"):
        load(path, other, resumed)


def load_other(path: Path, directory: Path) -> str:
    plan = tiny.plan_of(SAVED, "sequence-parallel", path)
    model, _ = tiny.build(plan, path)
    try:
        load(directory / "step-00000001", model)
    except InputError as error:
        return str(error)
    return ""


def save_untrained(path: Path, directory: Path) -> None:
    model, _ = tiny.build(tiny.plan_of(SAVED, "sequence-parallel", path), path)
    save(directory, model, None, RunState(step=1))


def refuse_to_write(directory: Path) -> str:
    """Only one rank cannot write."""
    if dist.get_rank() == 2:
        checkpoint.save.__globals__["ManifestWriter"].write_data.__globals__["TensorWriter"] = full_disk
    try:
        save_zoo({"a": 2, "b": 2}, False, directory)
    except InputError as error:
        return str(error)
    finally:
        checkpoint.save.__globals__["ManifestWriter"].write_data.__globals__["TensorWriter"] = TensorWriter
    return ""


def full_disk(*_: Any) -> TensorWriter:
    raise OSError(28, "No space left on device")


def test_every_rank_says_what_is_wrong(tmp_path: Path) -> None:
    on_ranks(4, save_untrained, path_of("llama"), tmp_path)
    for path, line in (
        (
            path_of("llama", vocab_size=244),
            "model.model.embed_tokens.weight: found [240, 96] of float32; allowed: [244, ",
        ),
        (
            path_of("llama", num_hidden_layers=1),
            "model.model.layers.1.self_attn.q_proj.weight: found a tensor of another",
        ),
        (
            path_of("llama", tie_word_embeddings=False),
            "model.lm_head.weight: found nothing of that name; allowed: all 21",
        ),
    ):
        for found in on_ranks(4, load_other, path, tmp_path):
            assert line in found
    for found in on_ranks(4, refuse_to_write, tmp_path / "full"):
        assert "pieces-00002.safetensors: found no space left on device; allowed: a path in a writable" in found
    assert latest(tmp_path / "full") is None
    (tmp_path / "file").write_text("")
    for each in (lambda: latest(tmp_path / "file"), lambda: save(tmp_path / "file", plain(1), None, RunState(step=1))):
        with pytest.raises(InputError, match=r"file.*: found not a directory; allowed"):
            each()


# Hugging Face directories


HUGGING_FACE = {
    "llama": ({"num_key_value_heads": 12, "tie_word_embeddings": False, **ODD}, {"data": 1, "tensor": 3}),
    "qwen3": ({"num_key_value_heads": 1}, {"data": 2, "tensor": 2}),  # tied; key/value heads that ranks share
    "gpt2": ({}, {"data": 1, "tensor": 4}),
    "gemma2": ({}, {"data": 2, "tensor": 1}),
}


def hugging_face(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(models.load_config(path))


def there_and_back(plan: Plan, path: Path, directory: Path, out: Path | None = None) -> Values:
    """What the weights of ``directory`` are in the parallelized model, which is written to ``out``."""
    model = models.build_meta(models.load_config(path), plan.dtype)
    source = from_safetensors(directory, {module: name for name, module in model.named_modules()})
    sw.parallelize(model, dense.mesh_of(**plan.mesh), plan, source)
    if out is not None:
        save_pretrained(model, out, shard_bytes=150_000)
    return wholes(dict(model.named_parameters()))


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_f3_safetensors_in_and_out_equal_from_pretrained(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    changes, axes = HUGGING_FACE[family]
    path = path_of(family, **changes)  # type: ignore[arg-type]
    model = hugging_face(path)
    model.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    plan = tiny.plan_of(axes, "sequence-parallel" if axes["tensor"] > 1 else "replicate", path)
    expected = wholes(dict(model.named_parameters()))
    assert same(on_ranks(plan.world_size, there_and_back, plan, path, tmp_path / "in", tmp_path / "out")[0], expected)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model) and again.dtype == model.dtype
    assert {name: value for name, value in again.config.to_dict().items() if name != "_name_or_path"} == {
        name: value
        for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "in").config.to_dict().items()
        if name != "_name_or_path"
    }
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_weights_of_another_type_and_of_the_base_model_alone_are_read(tmp_path: Path) -> None:
    """GPT-2 as it was first published: without the prefix, without the tied head, with the buffers of masks."""
    from safetensors.torch import save_file

    path = path_of("gpt2")
    state = hugging_face(path).bfloat16().state_dict()
    published = {
        name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"
    }
    save_file(published | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    plan = tiny.plan_of({"data": 1, "tensor": 2}, "sequence-parallel", path)
    found = on_ranks(2, there_and_back, plan, path, tmp_path)[0]
    assert found and all(numpy.array_equal(value, state[name].float().numpy()) for name, value in found.items())


def spoil_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda d: spoil_weights(d, lambda t: t.pop("model.norm.weight")),
        "in: model.norm.weight: found no weight of that",
    ),
    (
        lambda d: spoil_weights(d, lambda t: [t.pop(name) for name in list(t) if "layers.1" in name]),
        "in: model.layers.1.self_attn.q_proj.weight: found no weight of that name (nor of 8 others); allowed: every",
    ),
    (
        lambda d: spoil_weights(d, lambda t: t.update(extra=torch.ones(2))),
        "in: extra: found a weight; allowed: those of the model's parameters",
    ),
    (
        lambda d: spoil_weights(d, lambda t: t.update({"lm_head.weight": torch.ones(3, 96)})),
        "model.safetensors: lm_head.weight: found [3, 96]; allowed: [240, 96], as the config tells",
    ),
    (
        lambda d: spoil_weights(d, lambda t: t.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)})),
        "model.norm.weight: found int8; allowed: floating-point values",
    ),
    (
        lambda d: os.rename(d / "model.safetensors", d / "pytorch_model.bin"),
        "in: found pytorch_model.bin, a pickle; allowed: a directory with model.safetensors or model.safetensors.index",
    ),
    (lambda d: os.truncate(d / "model.safetensors", 5000), "model.safetensors: found "),
    (lambda d: shutil.rmtree(d), "in: found no such directory; allowed: a directory with model.safetensors"),
    (
        lambda d: (
            os.rename(d / "model.safetensors", d / "a.safetensors")
            or (d / "model.safetensors.index.json").write_text(
                '{"weight_map": {"model.norm.weight": "../a.safetensors"}}'
            )
        ),
        "index.json: weight_map.model.norm.weight: found '../a.safetensors'; allowed: a file of the same directory",
    ),
    (
        lambda d: (
            os.rename(d / "model.safetensors", d / "a.safetensors")
            or (d / "model.safetensors.index.json").write_text('{"weight_map": {"nothing": "a.safetensors"}}')
        ),
        "a.safetensors: nothing: found no such weight; allowed: those that model.safetensors.index.json tells",
    ),
    (
        lambda d: os.unlink(d / "model.safetensors") or (d / "model.safetensors.index.json").write_text("[]"),
        "index.json: found no weight_map; allowed: a mapping of weight names to file names",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_bad_weights_are_one_line_that_names_the_weight(case: int, tmp_path: Path) -> None:
    spoil, line = WRONG[case]
    path = path_of("llama", tie_word_embeddings=False)
    hugging_face(path).save_pretrained(tmp_path / "in")
    spoil(tmp_path / "in")
    model = models.build_meta(models.load_config(path))
    with pytest.raises(InputError) as caught:
        from_safetensors(tmp_path / "in", {module: name for name, module in model.named_modules()})
    assert line in str(caught.value) and "\n" not in str(caught.value)


def export_refused(path: Path, out: Path) -> str:
    model, _ = tiny.build(tiny.plan_of(SAVED, "sequence-parallel", path), path)
    try:
        save_pretrained(model, out)
    except InputError as error:
        return str(error)
    return ""


def test_an_export_that_cannot_be_written_is_refused_by_every_rank(tmp_path: Path) -> None:
    path = tiny.config_path()
    for found in on_ranks(4, export_refused, path, path):
        assert found == f"{path}: found something there; allowed: a directory that is empty or does not exist yet"
    for found in on_ranks(4, export_refused, path, path / "below"):
        assert "config.json/below: found not a directory; allowed: a path in a writable directory" in found
    (tmp_path / "out").mkdir()
    assert on_ranks(4, export_refused, path, tmp_path / "out") == [""] * 4
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


# The training command


def trained(run: Path, ranks: int, spoil: Callable[[int], object] = lambda rank: None) -> list[int]:
    """Exit codes of the ranks of a training run, each forked from here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> None:
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in {**launched, "MASTER_PORT": port}.items()})
        spoil(rank)
        train(run)

    return forked(ranks, work)


def die_in_the_save_of_step_8(rank: int) -> None:
    make = TensorWriter.__init__

    def init(self: TensorWriter, path: Path, *rest: Any) -> None:
        if rank == 1 and "step-00000008" in str(path):
            os._exit(1)
        make(self, path, *rest)

    TensorWriter.__init__ = init  # type: ignore[method-assign]


def curve(place: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line.get("evaluation/loss")) for line in read_metrics(place / "out" / METRICS)]


def test_f4_a_run_continues_from_its_last_whole_checkpoint_to_the_same_curve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = list(documents("text", standard_library_text(max_bytes=60_000, package="encodings")))
    start = hugging_face(tiny.config_path(vocab_size=VOCAB))
    nn.init.zeros_(start.lm_head.weight)
    start.save_pretrained(tmp_path / "start")
    changes = {
        "steps": 10,
        "checkpoint": {"directory": "saved", "every": 4, "keep": 2},
        "weights": str(tmp_path / "start"),
        "export": "trained",
        "metrics": ["jsonl"],
    }
    runs = {}
    for name in ("through", "killed", "alone"):
        (tmp_path / name).mkdir()
        runs[name] = prepare(tmp_path / name, texts, 1 if name == "alone" else 2, changes)
    assert trained(runs["through"], 2) == [0, 0]
    assert sorted(os.listdir(tmp_path / "through" / "saved")) == ["step-00000008", "step-00000010"]
    expected = curve(tmp_path / "through")
    assert [step for step, *_ in expected] == list(range(1, 11)) and expected[-1][2] is not None
    assert expected[0][1] == pytest.approx(math.log(VOCAB), rel=1e-6)  # it started from those weights

    assert trained(runs["killed"], 2, die_in_the_save_of_step_8)[1] == 1
    assert len(curve(tmp_path / "killed")) == 8 and not (tmp_path / "killed" / "trained").exists()
    capfd.readouterr()
    assert trained(runs["killed"], 2) == [0, 0]
    assert f"continues after step 4 from {tmp_path / 'killed' / 'saved' / 'step-00000004'}" in capfd.readouterr().out
    assert curve(tmp_path / "killed") == expected
    exports = [tmp_path / name / "trained" / "model.safetensors" for name in ("through", "killed")]
    assert exports[0].read_bytes() == exports[1].read_bytes()

    shutil.copytree(tmp_path / "through" / "saved" / "step-00000008", tmp_path / "alone" / "saved" / "step-00000008")
    assert trained(runs["alone"], 1) == [0]  # another number of ranks
    assert [step for step, *_ in curve(tmp_path / "alone")] == [9, 10]
    for one, two in zip(curve(tmp_path / "alone"), expected[8:], strict=True):
        assert one[1] == pytest.approx(two[1], rel=1e-6)

    # The same directory with other data is another run.
    (tmp_path / "alone" / "more.jsonl").write_text('{"body": "more"}\n')
    shutil.rmtree(tmp_path / "alone" / "trained")
    assert trained(runs["alone"], 1) == [2]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "step-00000010: tokens: found " in line and "; allowed: " in line


def test_metrics_of_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    forget_metrics_after(path, 3)
    assert not path.exists()
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": step})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')
    forget_metrics_after(path, 3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
