"""Saves that are killed, and checkpoints that are wrong: the older one stays, one line says why (ACCEPTANCE F4)."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import training_state as checkpoint
from shardwright.checkpoint.manifest import MANIFEST, RunState
from shardwright.checkpoint.tensor_file import TensorWriter
from shardwright.checkpoint.training_state import MOMENTS, latest, load, save
from shardwright.errors import InputError
from shardwright.step.train_step import FusedAdamW
from support import tiny
from support.ranks import on_ranks
from test_checkpoint import SAVED, load_zoo, same, save_zoo, zoo
from test_families import path_of


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
    optimizer = FusedAdamW(module.parameters())
    bare = save(tmp_path, module, None, RunState(step=1))
    with pytest.raises(InputError, match="optimizer: found no moments; allowed: a checkpoint that was saved with an"):
        load(bare, module, optimizer)
    module.weight.grad = torch.ones(4, 3)  # the bias has no gradient, and so no moments
    optimizer.step()
    path = save(tmp_path, module, optimizer, RunState(step=2))
    other = plain(0)
    resumed = FusedAdamW(other.parameters())
    other.bias.grad = torch.ones(4)
    resumed.step()
    load(path, other, resumed)
    assert other.bias not in resumed.state
    assert same(
        *({moment: each.state[owner][moment].numpy() for moment in MOMENTS} for each, owner in (
            (optimizer, module.weight), (resumed, other.weight)))
    )  # fmt: skip
    frozen = FusedAdamW([other.bias])
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
