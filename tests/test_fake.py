"""The short ways of ShortFakeMode end where FakeTensorMode does: equal rehearsals, equal errors, shared storages."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shardwright as sw
from shardwright.errors import InputError
from shardwright.simulate import rehearsal as _rehearse
from shardwright.simulate.fake import ShortFakeMode
from support import tiny
from support.marks import slow_in
from test_families import FAMILIES

CASES = {
    "llama, ring, recomputed": ("llama", "sequence-parallel-ring", {"recompute": {"*": "block"}}),
    "llama, async, bfloat16": ("llama", "sequence-parallel-async", {"dtype": "bfloat16", "master_dtype": "float32"}),
    "gpt2, all-reduce": ("gpt2", "tensor-all-reduce", {"accumulation": 2}),
    "gemma2, async": ("gemma2", "sequence-parallel-async", {"in_flight": 1}),
    "qwen3, kept": ("qwen3", "sequence-parallel-keep", {"backend": "nccl"}),
}


@pytest.mark.parametrize("name", slow_in(["gpt2, all-reduce", "gemma2, async"], CASES))
def test_a_rehearsal_is_the_one_of_torchs_own_mode(name, monkeypatch):
    family, layout, settings = CASES[name]
    path = tiny.write_config({"model_type": family, **FAMILIES[family]})
    plan = tiny.plan_of({"data": 2, "tensor": 2}, layout, path, micro_batch=4, params={"*": "parameters"}, **settings)
    short = sw.rehearse(path, plan)
    monkeypatch.setattr(_rehearse, "ShortFakeMode", FakeTensorMode)
    usual = sw.rehearse(path, plan)
    assert short.events == usual.events
    assert (short.storages, short.saved, short.arena) == (usual.storages, usual.saved, usual.arena)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_what_is_remembered_is_a_new_tensor_each_time():
    with ShortFakeMode() as mode:
        x, w = torch.empty(4, 6), torch.empty(8, 6, dtype=torch.float32)
        first, second = torch.mm(x, w.t()), torch.mm(x, w.t())
        assert any(key[0] is torch.ops.aten.mm.default for key in mode._known)
    assert type(second) is FakeTensor and second.fake_mode is mode
    assert (second.shape, second.stride(), second.dtype) == (first.shape, first.stride(), first.dtype)
    assert second.device == torch.device("cpu") and not same(first, second) and not same(second, x)
    assert second.untyped_storage().nbytes() == 4 * 8 * 4


def test_numbers_of_other_types_are_other_arguments():
    with ShortFakeMode():
        x = torch.ones(4, dtype=torch.int64)
        assert [torch.mul(x, number).dtype for number in (2, 2.0, 1, True)] == [
            torch.int64, torch.float32, torch.int64, torch.int64,
        ]  # fmt: skip


def test_shapes_are_checked_whatever_was_seen_before():
    with ShortFakeMode():
        x = torch.empty(4, 6)
        torch.mm(x, torch.empty(6, 2))
        torch.empty(4, 2).add_(torch.empty(2))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="same reduction dim"):
                torch.mm(torch.empty(4, 5), torch.empty(6, 2))
            with pytest.raises(RuntimeError, match=r"size|shape|broadcast"):
                torch.empty(4, 2).add_(torch.empty(3))


def test_what_is_written_into_is_given_back():
    with ShortFakeMode():
        for _ in range(2):
            x, out = torch.empty(4, 6), torch.empty(4, 4)
            assert x.mul_(2) is x
            assert torch.mm(x, x.t(), out=out) is out
            small = torch.empty(0)
            torch.mm(x, x.t(), out=small)  # it grows, whatever was seen before
            assert small.shape == (4, 4)


def test_views_share_their_storage():
    with ShortFakeMode():
        x = torch.empty(4, 6)
        for _ in range(2):
            views = [x[1:], x[0], x.view(24), x.t(), torch.ops.aten._unsafe_view(x, [6, 4]), x.detach(), *x.split(2)]
            assert all(same(x, view) for view in views)
            assert views[0].storage_offset() == 6


def test_constants_keep_their_values():
    with ShortFakeMode():
        assert (torch.tensor(3) + 1).item() == 4


def laid_out(dtype, columns):
    """Shape, strides and bytes of two grouped products and their gradients, and of a gradient of softplus."""
    a = torch.empty(12, 16, dtype=dtype).normal_().requires_grad_()
    b = torch.empty(3, columns, 16, dtype=dtype).normal_().transpose(1, 2).requires_grad_()
    groups = torch.full((3,), 4, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    y = torch.nn.functional.grouped_mm(a, b, offs=groups)
    y.backward(torch.empty_strided(y.shape, y.stride(), dtype=dtype).fill_(1))
    turned = torch.ones(2, 5, 3).transpose(1, 2).requires_grad_()
    (soft,) = torch.autograd.grad(torch.nn.functional.softplus(turned), turned, torch.ones(2, 3, 5))
    found = [y, a.grad, b.grad, soft]
    return [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in found]


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float32, 24), (torch.float32, 12), (torch.float16, 24), (torch.bfloat16, 24)]
)
def test_grouped_products_and_softplus_are_laid_out_as_real_ones(dtype, columns):
    real = laid_out(dtype, columns)
    with ShortFakeMode():
        assert laid_out(dtype, columns) == real


def test_grouped_products_of_rows_that_do_not_lie_at_16_bytes_are_refused():
    """As torch's kernel does; rows of a result may lie so."""
    with ShortFakeMode(), pytest.raises(InputError, match="grouped product: found rows of 10 elements; allowed: "):
        torch.nn.functional.grouped_mm(
            torch.empty(12, 10), torch.empty(3, 10, 16), offs=torch.empty(3, dtype=torch.int32)
        )
