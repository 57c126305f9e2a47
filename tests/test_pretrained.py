"""Hugging Face directories in and out (ACCEPTANCE F3)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import shardwright as sw
from shardwright.checkpoint.export import save_pretrained
from shardwright.checkpoint.pretrained import from_safetensors
from shardwright.errors import InputError
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.spec.plan import Plan
from support import dense, tiny
from support.ranks import on_ranks
from test_checkpoint import ODD, SAVED, Values, same, wholes
from test_families import path_of

HUGGING_FACE = {
    "llama": ({"num_key_value_heads": 12, "tie_word_embeddings": False, **ODD}, {"data": 1, "tensor": 3}),
    "qwen3": ({"num_key_value_heads": 1}, {"data": 2, "tensor": 2}),  # tied; key/value heads that ranks share
    "gpt2": ({}, {"data": 1, "tensor": 4}),
    "gemma2": ({}, {"data": 2, "tensor": 1}),
}


def hugging_face(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(load_config(path))


def there_and_back(plan: Plan, path: Path, directory: Path, out: Path | None = None) -> Values:
    """What the weights of ``directory`` are in the parallelized model, which is written to ``out``."""
    model = build_meta(load_config(path), plan.dtype)
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
    model = build_meta(load_config(path))
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
