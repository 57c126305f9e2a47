"""One site on a grid of real ranks: results and gradients as errors against dense float64, and the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.spec.presets import preset
from shardwright.spec.site import Site
from support import dense, fuzz

KINDS = ("column", "row")
DESIGNS = ("grid-scatter", "grid-reduce")
GRIDS = [
    {"i": 2, "j": 2, "l": 2},
    {"i": 2, "j": 1, "l": 4},
    {"i": 2, "j": 3, "l": 1},
    {"i": 1, "j": 2, "l": 2},
]
EVEN, UNEVEN = (48, 72, 24), (21, 13, 17)
"""(m, k, n) of products."""


def world(axes):
    return torch.Size(axes.values()).numel()


def named(axes):
    return "x".join(str(size) for size in axes.values())


def layout_of(name: str, kind: str, **changes) -> sw.GridLayout:
    """A preset's layout of a site of that kind, with these fields changed."""
    layout = preset(name)(Site("", kind, 0, 0, ()))
    return sw.GridLayout(**{**layout.to_dict(), **changes})


def logged(trace: sw.Trace) -> list[tuple[str, str, tuple[str, ...], int]]:
    """(phase, kind, axes, size) of every collective, in issue order."""
    return [(c.phase, c.kind, c.axes, c.size) for c in trace.collectives]


def run(
    layout: sw.GridLayout,
    axes: Mapping[str, int],
    sizes: tuple[int, int, int],
    bias: bool = False,
    siblings: int = 1,
    ndim: int = 2,
    poison: bool = False,
    mesh_of: Callable[..., DeviceMesh] = dense.mesh_of,
) -> tuple[float, list[torch.Tensor], sw.Trace]:
    """(the largest error on this rank, this rank's results, the trace) of one forward and backward of M, K, N."""
    t, k, n = sizes
    mesh = mesh_of(**axes)
    references = [torch.nn.Linear(k, n, bias=bias, dtype=torch.float64) for _ in range(siblings)]
    for seed, reference in enumerate(references):
        for parameter in reference.parameters():
            parameter.data.copy_(dense.random(*parameter.shape, seed=10 * seed + parameter.dim()))
    lins = sw.GridLinear.siblings(references, layout, mesh)
    arena = sw.Runtime.of(mesh).arena
    arena.poison = poison
    shape = (t,) if ndim == 2 else (1, t)
    x_whole = dense.random(*shape, k, seed=3)
    ups = [dense.random(*shape, n, seed=4 + i) for i in range(siblings)]
    x = dense.part(x_whole, mesh, lins[0].input_placements).requires_grad_()
    gradients = [dense.part(up, mesh, lins[0].output_placements) for up in ups]
    rows = fuzz.rows_of(t, layout, mesh)
    with sw.record(torch.nn.ModuleList(lins), x) as trace:
        ys = [lin(x, tokens=rows) for lin in lins]
        torch.autograd.backward(ys, gradients)
    arena.poison = False
    assert arena.held == 0
    x_whole.requires_grad_()
    outs = [reference(x_whole) for reference in references]
    torch.autograd.backward(outs, ups)
    pairs = [(x.grad, dense.part(x_whole.grad, mesh, lins[0].input_placements))]
    for lin, reference, y, out in zip(lins, references, ys, outs, strict=True):
        pairs.append((y.detach(), dense.part(out.detach(), mesh, lin.output_placements)))
        for mine, other in zip(lin.parameters(), reference.parameters(), strict=True):
            assert mine.grad.placements == mine.placements
            pairs.append((mine.grad.to_local(), dense.cut(other.grad, mine.device_mesh, mine.placements)))
            if all(size % mesh.size() == 0 for size in other.shape):  # nothing uneven: it can be put together
                pairs.append((mine.grad.full_tensor(), other.grad))
    return largest(pairs), [local.clone() for local, _ in pairs], trace


def largest(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference; shapes must agree."""
    for found, expected in pairs:
        assert found.shape == expected.shape, (found.shape, expected.shape)
    return max((dense.error(found, expected) for found, expected in pairs if found.numel()), default=0.0)
