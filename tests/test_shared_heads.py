"""Key/value heads that are fewer than the ranks: each rank stores the rows that it uses, copies count once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.runtime.runtime import Runtime
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec.site import Linear
from shardwright.step.clipping import grad_norm
from support import dense, tiny
from support.ranks import on_ranks
from support.reference import against_hugging_face, assert_same, both
from test_checkpoint import load_and_train, same, train_and_save
from test_families import path_of

SHARED = path_of("qwen2", num_key_value_heads=2)  # of 8 features, 2 ranks of 4 each; with biases
PUBLIC = path_of(
    "llama", hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=128, num_hidden_layers=1
)
"""The public case, at eight tensor ranks."""


def rows_and_norm(axes, path):
    """Rows of k_proj that this rank stores, and of its gradient; the norm of all gradients, and the reference's."""
    plan = tiny.plan_of(axes, "sequence-parallel", path, dtype="float64", micro_batch=2, sequence=8)
    mesh = dense.mesh_of(**axes)
    model, reference = both(path, plan, mesh)
    ids = torch.randint(0, 240, (2, 8), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    logits = reference(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in reference.parameters()))
    weight = model.model.layers[0].self_attn.k_proj.weight
    whole = dense.error(weight.grad.full_tensor(), reference.model.layers[0].self_attn.k_proj.weight.grad)
    rows = weight.to_local().shape[0], weight.grad.to_local().shape[0]
    return rows, grad_norm(model.parameters()).item(), expected, whole


def test_a_rank_stores_the_rows_of_its_head():
    for rows, norm, expected, whole in on_ranks(8, rows_and_norm, {"data": 1, "tensor": 8}, PUBLIC):
        assert rows == (128, 128)
        assert norm == pytest.approx(expected, rel=1e-10) and whole <= 1e-11


def test_a_rehearsal_stores_as_many():
    plan = tiny.plan_of({"data": 1, "tensor": 8}, "sequence-parallel", PUBLIC, micro_batch=2, sequence=8)
    trace = rehearse(PUBLIC, plan, rank=3)
    sizes = [storage.bytes for storage in trace.storages if storage.category == "parameter"]
    assert sizes.count(128 * 256 * 4) == 4  # q (8 heads over 8 ranks), k, v, and o


@pytest.mark.parametrize(
    ("axes", "layout"),
    [({"data": 2, "tensor": 4}, "sequence-parallel"), ({"tensor": 4, "data": 2}, "tensor-all-reduce")],
)
def test_every_gradient_equals_dense_beside_data_ranks(axes, layout):
    for errors in on_ranks(8, against_hugging_face, SHARED, axes, layout, 4, 8):
        assert max(errors.values()) <= 1e-11, errors


@pytest.mark.parametrize(("data", "level"), [(1, "replicate"), (2, "parameters")])
def test_training_is_that_of_one_rank_and_the_rehearsal_is_the_run(data, level):
    ((reference, _),) = on_ranks(
        1, tiny.train, tiny.plan_of({"data": 1, "tensor": 1}, "replicate", SHARED), 3, 0, SHARED
    )
    plan = tiny.plan_of({"data": data, "tensor": 4}, "sequence-parallel", SHARED, params={"*": level})
    for rank, (losses, real) in enumerate(on_ranks(4 * data, tiny.train, plan, 3, 2, SHARED)):
        assert losses == pytest.approx(reference, rel=1e-5)
        if rank == 4 * data - 3:
            assert_same(rehearse(SHARED, plan, rank=rank), real)


def test_checkpoints_hold_each_row_once_and_come_back_on_other_layouts(tmp_path: Path):
    def plan(data, tensor, level):
        axes, layout = {"data": data, "tensor": tensor}, "sequence-parallel" if tensor > 1 else "replicate"
        return tiny.plan_of(axes, layout, SHARED, dtype="float64", params={"*": level})

    saved, *_ = on_ranks(4, train_and_save, plan(1, 4, "replicate"), SHARED, tmp_path)[0]
    for data, tensor, level in ((1, 1, "replicate"), (2, 2, "gradients")):
        loaded, *_ = on_ranks(data * tensor, load_and_train, plan(data, tensor, level), SHARED, tmp_path)[0]
        assert same(loaded, saved), (data, tensor, level)
    saved, *_ = on_ranks(4, train_and_save, plan(2, 2, "optimizer"), SHARED, tmp_path / "other")[0]
    loaded, *_ = on_ranks(4, load_and_train, plan(1, 4, "optimizer"), SHARED, tmp_path / "other")[0]
    assert same(loaded, saved)


def sub_axes():
    """The groups of two axes, unflattened: six heads over (2, 3, 2) ranks, of which the outer two split them."""
    mesh = dense.mesh_of(a=2, b=2, c=2)
    runtime = Runtime.of(mesh)
    arranged, parts, copies = runtime.unflattened_mesh(("a", "c"), 2)
    groups = [runtime.group(axes) for axes in ((parts,), (copies,), ("b", copies))]
    return [group.ranks for group in groups], arranged.get_coordinate(), [group.axes for group in groups]


def test_two_axes_make_one_of_parts_and_one_of_copies():
    answers = on_ranks(8, sub_axes)
    for rank, (ranks, coordinate, axes) in enumerate(answers):
        a, b, c = rank // 4, rank // 2 % 2, rank % 2
        assert ranks == [
            tuple(4 * i + 2 * b + c for i in range(2)),
            tuple(4 * a + 2 * b + i for i in range(2)),
            tuple(range(4 * a, 4 * a + 4)),
        ]
        assert coordinate == (b, a, c) and axes == [("a", "c"), ("a", "c"), ("a", "b", "c")]


def neither():
    facts = [Linear("k", 24, unit=8, sharable=True)]
    layout = sw.GridLayout(n="tensor")
    try:
        sw.GridLinear.siblings([torch.nn.Linear(8, 24)], layout, dense.mesh_of(tensor=2), "site", facts=facts)
    except sw.InputError as error:
        return str(error)
    return ""


def test_heads_that_neither_divide_nor_are_divided_are_refused():
    for line in on_ranks(2, neither):
        assert line.startswith("k: found 3 units (heads) over 2 ranks; allowed: a multiple")
