"""Sites under torch.compile: one graph, the same collectives, the same saved bytes, the same numbers as eager mode."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright import trace
from support import dense, grids
from support.marks import slow_in
from support.ranks import on_ranks


class Block(torch.nn.Module):
    """Two siblings, something between if asked for, and a row."""

    def __init__(self, mesh, mode, save_x, between):
        super().__init__()
        torch.manual_seed(0)
        column = sw.GridLayout(n="tensor", x="sharded", overlap=mode, save_x=save_x)
        row = sw.GridLayout(k="tensor", y="sharded", overlap=mode)
        linears = [torch.nn.Linear(16, 32, dtype=torch.float64) for _ in range(2)]
        self.gate, self.up = sw.GridLinear.siblings(linears, column, mesh)
        self.down = sw.GridLinear.from_dense(torch.nn.Linear(32, 16, dtype=torch.float64), row, mesh)
        self.between = between

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        return self.down(torch.nn.functional.silu(gate) * up if self.between else gate + up)


def compare(backend, mode, save_x, between, needs_x=True):
    """For eager and compiled: collectives forward and backward, bytes saved beside parameters, gradients."""
    mesh = dense.mesh_of(tensor=2)
    torch._dynamo.reset()
    model = Block(mesh, mode, save_x, between)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = dense.random(8, 16, seed=1 + mesh.get_rank()).requires_grad_(needs_x)
    seen: list[tuple] = []
    original = trace.collective

    def spy(kind, axes, ranks, size, sent, mode="blocking", module=""):
        seen.append((kind, axes, size, sent, mode))
        original(kind, axes, ranks, size, sent, mode=mode, module=module)

    trace.collective = spy
    answers = []
    try:
        for function in (model, compiled, compiled):
            x.grad = None
            model.zero_grad()
            seen.clear()
            packed: dict[int, int] = {}

            def pack(tensor, packed=packed):
                storage = tensor.untyped_storage()
                packed[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = function(x)
            forward = list(seen)
            y.square().sum().backward()
            for parameter in model.parameters():
                packed.pop(parameter.to_local().untyped_storage().data_ptr(), None)
            grads = [x.grad] if needs_x else []
            grads += [parameter.grad.to_local() for parameter in model.parameters()]
            answers.append(
                (forward, seen[len(forward) :], sum(packed.values()), [g.clone() for g in grads], y.detach())
            )
    finally:
        trace.collective = original
    return answers


@pytest.mark.parametrize("backend", slow_in(["inductor"], ["aot_eager", "inductor"]))
@pytest.mark.parametrize("mode", ["blocking", "async", "ring"])
def test_compiled_is_eager(backend, mode):
    for save_x, between in (("shard", False), ("gathered", False), ("shard", True)):
        for eager, first, second in on_ranks(2, compare, backend, mode, save_x, between):
            for compiled in (first, second):
                assert compiled[0] == eager[0] and compiled[1] == eager[1]
                if between:  # the compiler may recompute what lies between the sites, never gather less or keep more
                    assert compiled[2] <= eager[2]
                else:
                    # X (shard or gathered) and the row's input, and nothing else
                    assert compiled[2] == eager[2] == 8 * ((8 if save_x == "shard" else 16) * 16 + 16 * 16)
                assert all(dense.error(a, b) <= 1e-12 for a, b in zip(eager[3], compiled[3], strict=True))
                assert dense.error(eager[4], compiled[4]) <= 1e-12


def test_compiled_trains_where_the_input_wants_no_gradient():
    for eager, *compiled in on_ranks(2, compare, "aot_eager", "blocking", "shard", True, False):
        for answer in compiled:
            assert all(dense.error(a, b) <= 1e-12 for a, b in zip(eager[3], answer[3], strict=True))


def on_a_grid(mode):
    """The largest difference between eager and compiled results of a column and a row site; bytes left leased."""
    mesh = dense.mesh_of(i=2, j=2, l=2)
    torch._dynamo.reset()
    torch.manual_seed(0)
    sites = [
        sw.GridLinear.from_dense(
            torch.nn.Linear(k, n, dtype=torch.float64), grids.layout_of("grid-scatter", kind, overlap=mode), mesh
        )
        for k, n, kind in ((16, 32, "column"), (32, 16, "row"))
    ]
    model = torch.nn.Sequential(*sites)
    x = dense.part(dense.random(16, 16, seed=1), mesh, sites[0].input_placements).requires_grad_()
    answers = []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        x.grad = None
        model.zero_grad()
        y = function(x)
        y.backward(torch.ones_like(y))
        answers.append([y.detach(), x.grad, *(parameter.grad.to_local() for parameter in model.parameters())])
    return max(dense.error(a, b) for a, b in zip(*answers, strict=True)), sw.Runtime.of(mesh).arena.held


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_grid_compiles(mode):
    assert on_ranks(8, on_a_grid, mode) == [(0.0, 0)] * 8
