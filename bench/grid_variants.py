"""The ways to run one MLP on a grid i × j × l that bench/grid.py compares: our layouts, and axonn's expert mode.

Each holds the same weights; on the grid the first linear splits N by j and K by l, the second the other way round, so
that Y lies as X does. axonn's depth, outer and inner axes are i, j and l: its layout is our design 2, on equal ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from variants import Task, Variant

import shardwright as sw
from shardwright import trace
from shardwright.comm.exchange import ReduceScatterHandle
from shardwright.overlap.product import activation_placements
from shardwright.spec.presets import preset
from shardwright.spec.site import Linear, Site
from shardwright.values.placement import cut

AXES = ("i", "j", "l")
Layouts = Callable[[Site], sw.GridLayout]


@dataclass
class GridVariant(Variant):
    """A way to run the MLP. ``parts``: from dense dX, dW, dW to what this rank should have found."""

    parts: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list


def every_variant(task: Task, mesh: DeviceMesh) -> tuple[list[GridVariant], list[str]]:
    """All that run on this grid, and a line on each that does not."""
    made, missing = [compute_alone(task, mesh)], list[str]()
    wanted: list[tuple[str, Layouts, dict[str, str]]] = [
        ("design 1", preset("grid-scatter"), {"save_x": "shard"}),
        ("design 1", preset("grid-scatter"), {"save_x": "gathered"}),
        ("design 1, async", preset("grid-scatter"), {"save_x": "shard", "overlap": "async"}),
        ("design 2", preset("grid-reduce"), {}),
        ("design 2, async", preset("grid-reduce"), {"overlap": "async"}),
        ("1D, all ranks", one_dimension, {"save_x": "shard"}),
        ("2D, i × jl", two_dimensions, {"save_x": "shard"}),
    ]
    for name, layouts, settings in wanted:
        if layouts is two_dimensions and 1 in (mesh["i"].size(), mesh.size() // mesh["i"].size()):
            missing.append(f"{name}: one of its two axes has a single rank on this grid")
            continue
        made.append(ours(task, mesh, name, layouts, settings))
    try:
        made += axonns(task, mesh)
    except ImportError as error:
        missing.append(f"axonn: {error}")
    return made, missing


# -- ours -------------------------------------------------------------------------------------------------------------


def one_dimension(site: Site) -> sw.GridLayout:
    """Sequence parallel over every rank: the grid as one axis."""
    return sw.GridLayout(n=AXES, x="sharded") if site.kind == "column" else sw.GridLayout(k=AXES, y="sharded")


def two_dimensions(site: Site) -> sw.GridLayout:
    """The preset grid-2d with j and l as its second axis."""
    return sw.GridLayout(m=("i",), n=("j", "l"), x="sharded-features", w="sharded")


def ours(task: Task, mesh: DeviceMesh, name: str, layouts: Layouts, settings: dict[str, str]) -> GridVariant:
    """GridLinear twice, in the layouts of a column and of a row site."""
    tokens, (hidden, width) = task.x.shape[0], task.dense[0].weight.shape
    sites = (
        Site("up", "column", tokens, width, (Linear("up", hidden),)),
        Site("down", "row", tokens, hidden, (Linear("down", width),)),
    )
    first, second = (
        sw.GridLinear.from_dense(linear, replace(layouts(site), **settings), mesh, site.name)
        for linear, site in zip((task.dense[0], task.dense[2]), sites, strict=True)
    )

    def parts(dense: list[torch.Tensor]) -> list[torch.Tensor]:
        weights: list[Any] = [first.weight, second.weight]
        found = [cut(dense[0], mesh, first.input_placements)]
        return found + [
            cut(whole, weight.device_mesh, weight.placements) for whole, weight in zip(dense[1:], weights, strict=True)
        ]

    x = cut(task.x, mesh, first.input_placements).requires_grad_()
    upstream = cut(task.upstream, mesh, second.output_placements)
    module = nn.Sequential(first, nn.ReLU(), second)
    return GridVariant(name, "ours", settings.get("save_x", "–"), module, x, upstream, parts=parts)


def tile(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of X, or of Y, as design 2 and axonn hold it: tokens by i, features by l."""
    return cut(whole, mesh, activation_placements(("i",), ("l",), mesh))


def compute_alone(task: Task, mesh: DeviceMesh) -> GridVariant:
    """The same local products on operands that are already here: no communication, so its sums are partial."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    for place, split in ((0, (Shard(0), Shard(1))), (2, (Shard(1), Shard(0)))):
        weight = cut(task.dense[place].weight.detach(), mesh, (Replicate(), *split))
        module[place].weight = nn.Parameter(weight)
    x, upstream = tile(task.x, mesh).requires_grad_(), tile(task.upstream, mesh)
    return GridVariant("compute alone", "compute", "–", module, x, upstream)


# -- axonn ------------------------------------------------------------------------------------------------------------


def axonns(task: Task, mesh: DeviceMesh) -> list[GridVariant]:
    """axonn's linears as they come; with all its overlapping; and that with our reduce-scatter in the place of gloo's,
    which is an all-reduce.
    """
    from axonn import axonn

    i, j, l = mesh.shape  # noqa: E741
    new_group = dist.new_group
    with (
        on_cpu(),
        mock.patch("torch.cuda.set_device", lambda device: None),
        mock.patch("torch.distributed.new_group", lambda ranks, backend: new_group([int(r) for r in ranks])),
    ):
        axonn.init(G_intra_r=j, G_intra_c=l, G_intra_d=i, gpus_per_node=1)
    made = [axonn_variant(task, mesh, "axonn", lambda module: on_cpu())]
    made.append(axonn_variant(task, mesh, "axonn, overlapped", overlapped))
    if i > 1:
        exchange = our_reduce_scatter(mesh)
        made.append(axonn_variant(task, mesh, "axonn, overlapped + our reduce-scatter", overlapped, exchange))
    return made


def axonn_variant(
    task: Task,
    mesh: DeviceMesh,
    name: str,
    around: Callable[[nn.Module], AbstractContextManager[Any]],
    exchange: Callable[..., torch.Tensor] | None = None,
) -> GridVariant:
    """Two linears in expert mode, the second transposed."""
    from axonn.intra_layer import Linear as AxonnLinear
    from axonn.intra_layer import fully_connected

    hidden, width = task.dense[0].weight.shape
    with mock.patch.object(
        fully_connected, "initialize_params", partial(fully_connected.initialize_params, init_device="cpu")
    ):
        linears = [
            AxonnLinear(width, hidden, bias=False, expert_mode=True),
            AxonnLinear(hidden, width, bias=False, expert_mode=True, transpose=True),
        ]

    def share(linear: Any, whole: torch.Tensor) -> torch.Tensor:
        groups = linear.outer_group, linear.inner_group, linear.depth_group
        return fully_connected.extract_local_params_from_full_params(whole, *groups)

    def parts(dense: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            tile(dense[0], mesh),
            *(share(linear, whole) for linear, whole in zip(linears, dense[1:], strict=True)),
        ]

    for linear, dense in zip(linears, (task.dense[0], task.dense[2]), strict=True):
        # in storage of its own, as its cut is a view
        linear.weight = nn.Parameter(share(linear, dense.weight.detach()).clone())
    module = nn.Sequential(linears[0], nn.ReLU(), linears[1])
    x, upstream = tile(task.x, mesh).requires_grad_(), tile(task.upstream, mesh)

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            if exchange is not None:
                stack.enter_context(mock.patch.object(fully_connected, "_reduce_scatter", exchange))
            stack.enter_context(around(module))
            yield
        for parameter in module.parameters():
            if parameter.grad is not None:
                trace.note(parameter.grad, "gradient")  # given to it after backward, unseen

    return GridVariant(name, "axonn", "–", module, x, upstream, entered, parts=parts)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Where axonn asks CUDA for a device, or to wait: the CPU, and the operations that it has begun."""
    from axonn.intra_layer import overlap_communication

    def synchronize() -> None:
        for handle in overlap_communication.handles:
            handle.wait()

    with (
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch("torch.cuda.synchronize", synchronize),
    ):
        yield


@contextmanager
def overlapped(module: nn.Module) -> Iterator[None]:
    """Everything that axonn can overlap: all-reduces of dX, reduce-scatters of dW, gathers of the next W."""
    from axonn.intra_layer import optimize_communication

    gather = dist.all_gather_into_tensor

    def begin(output: torch.Tensor, part: torch.Tensor, **settings: Any) -> Any:
        with torch.enable_grad():  # gloo's thread, where gradients are on, writes to views that are made here
            return gather(output, part.detach(), **settings)

    everything = {"overlap_all_reduce": True, "overlap_reduce_scatter": True, "overlap_all_gather": True}
    with (
        on_cpu(),
        mock.patch("torch.distributed.all_gather_into_tensor", begin),
        optimize_communication(**everything, model_object_for_overlapping_allgathers=module),
    ):
        yield


def our_reduce_scatter(mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Ours in the form of axonn's ``_reduce_scatter``: under way when it returns, if it may."""
    from axonn.intra_layer import overlap_communication

    group = sw.Runtime.of(mesh).group(("i",))

    def exchange(input_: torch.Tensor, dim: int, process_group: Any, overlap_comm: bool = False) -> torch.Tensor:
        assert dim == 0
        output = input_.new_empty(input_.shape[0] // group.size)
        mode = "async" if overlap_comm else "blocking"
        moving = ReduceScatterHandle(input_.view(group.size, -1), output.view(1, -1), group, "", mode)
        if overlap_comm:
            overlap_communication.register_handle(SimpleNamespace(wait=moving.finish))
        else:
            moving.finish()
        return output

    return exchange
