"""Norms and clipping of gradients on any mixture of meshes, against the dense gradient's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwright as sw
from shardwright.runtime.runtime import Runtime
from shardwright.trace import record
from shardwright.values.placement import make_parameter, wrap
from support import dense
from support.ranks import on_ranks

MESHES = {
    1: {"data": 1, "tensor": 1},
    2: {"data": 1, "tensor": 2},
    3: {"data": 3, "tensor": 1},
    4: {"data": 2, "tensor": 2},
    8: {"data": 4, "tensor": 2},
}
R, S = Replicate(), Shard


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements, dtype=torch.float64) -> torch.nn.Parameter:
    """A parameter whose gradient is this rank's part of ``whole``."""
    local = dense.part(whole, mesh, placements).to(dtype)
    parameter = make_parameter(torch.zeros_like(local), whole.shape, mesh, placements)
    parameter.grad = wrap(local, whole.shape, mesh, placements)
    return parameter


def mixture(dtype=torch.float64) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Parameters on the mesh, on it flattened, on it permuted, on one of its axes, and plain; their whole gradients."""
    mesh = dense.mesh_of(**MESHES[dist.get_world_size()])
    flat = Runtime.of(mesh).storage_mesh(("data", "tensor"))
    groups = [mesh.get_group("tensor"), mesh.get_group("data")]
    permuted = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh.t(), mesh_dim_names=("tensor", "data"))
    where = [
        (mesh, (R, R)),
        (mesh, (S(0), S(1))),
        (mesh, (R, S(0))),
        (mesh, (S(0), R)),
        (mesh, (S(0), S(0))),
        (flat, (S(0),)),
        (flat, (R,)),
        (permuted, (S(0), S(0))),
        (permuted, (R, S(1))),
        (mesh["tensor"], (S(0),)),
        (mesh["data"], (R,)),
    ]
    wholes = [dense.random(5 + i, 3, seed=i).to(dtype).double() for i in range(len(where) + 1)]
    parameters = [placed(whole, *at, dtype) for whole, at in zip(wholes, where, strict=False)]
    plain = torch.nn.Parameter(torch.zeros_like(wholes[-1], dtype=dtype))
    plain.grad = wholes[-1].to(dtype, copy=True)
    unused = torch.nn.Parameter(torch.zeros(3))
    return [*parameters, plain, unused, parameters[0]], wholes


def norm_and_clip(p: float, dtype=torch.float64):
    parameters, wholes = mixture(dtype)
    every = torch.cat([whole.flatten() for whole in wholes])
    norm = torch.linalg.vector_norm(every, p)
    with record() as trace:
        found = sw.grad_norm(parameters, p)
    collectives = [(c.kind, c.size) for c in trace.collectives]
    again = sw.clip_grad_norm_(parameters, 0.5, p)
    after = sw.grad_norm(parameters, p)
    factor = 0.5 / (norm + 1e-6)
    moved = [
        dense.error(whole(parameter.grad).double(), expected * factor)
        for parameter, expected in zip(parameters, wholes, strict=False)
    ]
    untouched = sw.clip_grad_norm_(parameters, 10.0, p)
    bits = [each.item() for each in (found, again, after, untouched)]
    return (found / norm - 1).abs().item(), max(moved), found.shape, found.dtype, collectives, bits


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_the_norm_over_mixed_meshes_is_the_dense_one(n, p):
    answers = on_ranks(n, norm_and_clip, p)
    for error, moved, shape, dtype, collectives, bits in answers:
        assert error < 1e-14 and moved < 1e-12
        assert shape == () and dtype == torch.float64
        assert collectives == ([("all_reduce", 8 * n)] if n > 1 else [])
        assert bits == answers[0][-1]  # to the bit, on all ranks
        assert bits[0] == bits[1] and bits[2] == bits[3]
        assert bits[2] == pytest.approx(0.5, rel=1e-5)


def test_gradients_in_low_precision_add_up_in_float64():
    for error, *_ in on_ranks(4, norm_and_clip, 2.0, torch.bfloat16):
        assert error < 1e-14


def known():
    """32 ones over 4 ranks: √32, of which each rank alone sees √8; and one mesh with two kinds of axes beside it."""
    flat = dense.mesh_of(data=4)
    return sw.clip_grad_norm_([placed(torch.ones(32, dtype=torch.float64), flat, (S(0),))], 1.0).item()


def test_a_known_norm():
    assert on_ranks(4, known) == [pytest.approx(5.65685, abs=1e-5)] * 4


def replicated_twice():
    """Two meshes, replicated on both: as dense."""
    mesh = dense.mesh_of(data=2, tensor=2)
    flat = Runtime.of(mesh).storage_mesh(("data", "tensor"))
    ones = torch.ones(9, dtype=torch.float64)
    return sw.grad_norm([placed(ones, mesh, (R, R)), placed(ones, flat, (R,)), placed(ones, flat, (S(0),))]).item()


def test_replicated_gradients_count_once_on_two_meshes():
    assert on_ranks(4, replicated_twice) == [pytest.approx(math.sqrt(27), rel=1e-15)] * 4


def many_pieces():
    mesh = dense.mesh_of(data=2)
    large = dense.random(3 * 2**20 + 5, seed=0)
    found = sw.grad_norm([placed(large, mesh, (S(0),))])
    return (found / large.norm() - 1).abs().item()


def test_a_large_gradient_is_taken_piece_by_piece():
    assert max(on_ranks(2, many_pieces)) < 1e-13


def no_finite(value: float, p: float):
    mesh = dense.mesh_of(data=2)
    gradient = torch.ones(4, dtype=torch.float64)
    gradient[3] = value  # on the last rank only
    parameter, other = placed(gradient, mesh, (S(0),)), placed(torch.ones(2, dtype=torch.float64), mesh, (R,))
    reference = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (4, 2)]
    reference[0].grad, reference[1].grad = gradient.clone(), torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"found a gradient norm of .*; allowed: a finite one"):
        sw.clip_grad_norm_([parameter, other], 1.0, p, error_if_nonfinite=True)
    norm = sw.clip_grad_norm_([parameter, other], 1.0, p)
    dense_norm = torch.nn.utils.clip_grad_norm_(reference, 1.0, p)
    wholes = [whole(each.grad) for each in (parameter, other)]
    same = [torch.equal(a.nan_to_num(7), b.grad.nan_to_num(7)) for a, b in zip(wholes, reference, strict=True)]
    return same, torch.equal(norm.nan_to_num(7, 8), dense_norm.nan_to_num(7, 8).double())


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_goes_as_in_torch(value, p):
    assert on_ranks(2, no_finite, value, p) == [([True, True], True)] * 2


def refused():
    mesh = dense.mesh_of(data=2, tensor=2)
    parameter = placed(torch.ones(4), mesh, (R, R))
    for p in (0.0, -1.0, math.nan):
        with pytest.raises(sw.InputError, match=r"norm_type: found .*; allowed: a number above 0, or inf"):
            sw.grad_norm([parameter], p)
    parameter.grad = DTensor.from_local(torch.ones(4, dtype=torch.float64), mesh, (Partial(), R))
    with pytest.raises(sw.InputError, match=r"gradient: found placements .*Partial.*; allowed: Shard and Replicate"):
        sw.grad_norm([parameter])
    pair = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    half = DeviceMesh.from_group(pair.get_group("b"), "cpu", mesh_dim_names=("b",))
    with pytest.raises(sw.InputError, match=r"gradient: found meshes over ranks .* and .*; allowed: the same ranks"):
        sw.grad_norm([placed(torch.ones(4), mesh, (R, R)), placed(torch.ones(4), half, (S(0),))])


def test_what_has_no_norm_is_refused_in_one_line():
    on_ranks(4, refused)


def test_plain_gradients_need_no_process_group():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert sw.grad_norm([parameter]) == 0 and sw.grad_norm([]) == 0
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert sw.clip_grad_norm_(parameter, 1.0) == 5
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def unchanged_groups():
    parameters, _ = mixture()
    nameless = init_device_mesh("cpu", (2, 2))
    parameters.append(placed(torch.ones(4), nameless, (R, S(0))))
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(5):
        sw.clip_grad_norm_(parameters, 1.0)
        assert sw.grad_norm(parameters[-1:]) > 0  # a mesh without names
    return len(dist.distributed_c10d._world.pg_map) - before


def test_clipping_makes_no_groups():
    assert on_ranks(4, unchanged_groups) == [0] * 4


def on_a_half():
    """A mesh over some of the ranks: they alone take part."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    half = DeviceMesh.from_group(pair.get_group("b"), "cpu", mesh_dim_names=("b",))
    scale = 1.0 + pair.get_local_rank("a")
    ones = torch.full((8,), scale, dtype=torch.float64)
    return sw.grad_norm([placed(ones, half, (S(0),)), placed(ones, half, (R,))]).item()


def test_a_mesh_over_some_of_the_ranks():
    assert on_ranks(4, on_a_half) == pytest.approx([4.0, 4.0, 8.0, 8.0])
