"""Product: what one site's products need to know about the mesh, worked out once from the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright._errors import InputError
from shardwright.comm import AxisGroup, Runtime
from shardwright.layout import GridLayout


@dataclass(frozen=True)
class Product:
    """Y_i[M,N_i] = X[M,K] · W_i[N_i,K]ᵀ on the mesh, as this rank sees it.

    gather_x: the n axes on which X comes in parts: gathered before use, dX reduce-scattered.
    reduce_dx: the n axes on which X is whole: dX all-reduced.
    reduce_y: the k axes; y_word tells how the partial sums over them end.
    keep_gathered: backward keeps the gathered X (else what came in, and gathers it again).
    tokens_group: the ranks among which tokens are cut into pieces.
    defers: a row site's product is formed by the node that reduces it, piece by piece.
    wide: low-precision partial sums are added in fp32.
    """

    name: str
    layout: GridLayout
    runtime: Runtime
    gather_x: AxisGroup
    reduce_dx: AxisGroup
    reduce_y: AxisGroup
    y_word: str
    keep_gathered: bool
    tokens_group: AxisGroup
    defers: bool
    wide: bool

    @classmethod
    def of(cls, name: str, layout: GridLayout, mesh: DeviceMesh) -> Product:
        """Raises InputError for a layout that this version does not run, naming the field."""
        runtime = Runtime.of(mesh)
        check_supported(layout, runtime.sizes, name)
        gather_x, reduce_y = runtime.group(layout.axes_where("x", "sharded")), runtime.group(layout.k)
        scatters = reduce_y.size > 1 and layout.word("y", layout.k[0]) == "sharded"
        reduce_dx = runtime.group(layout.axes_where("x", "replicated"))
        wide = layout.reduce_dtype == "float32"
        alone = gather_x.size == 1 and reduce_dx.size == 1  # k is split and n is not
        return cls(
            name=name,
            layout=layout,
            runtime=runtime,
            gather_x=gather_x,
            reduce_dx=reduce_dx,
            reduce_y=reduce_y,
            y_word=layout.word("y", layout.k[0]) if layout.k else "replicated",
            keep_gathered=layout.save_x == "gathered",
            tokens_group=gather_x if gather_x.size > 1 else reduce_y if scatters else runtime.group(()),
            defers=layout.overlap != "blocking" and scatters and alone and not wide,
            wide=wide,
        )


def check_supported(layout: GridLayout, sizes: Mapping[str, int], name: str) -> None:
    """At most one axis a role, and tokens split by m before any other axis."""

    def refuse(field: str, found: object, allowed: str) -> None:
        raise InputError(f"{name or 'linear'}: layout.{field}: found {found!r}; allowed: {allowed}")

    for role in ("m", "n", "k"):
        axes = getattr(layout, role)
        if len(axes) > 1:
            refuse(role, list(axes), "at most one axis in this version")
    if layout.overlap == "ring" and layout.reduce_dtype != "same":
        refuse("reduce_dtype", layout.reduce_dtype, "same with overlap: ring, whose sums travel in their own dtype")
    for operand in ("x", "y"):
        if layout.axes_where(operand, "sharded-features"):
            refuse(operand, "sharded-features", "sharded, replicated in this version")
    if layout.save_x == "source":
        refuse("save_x", "source", "shard, gathered in this version")
    order = list(sizes)
    for tokens in (layout.input_token_axes, layout.output_token_axes):
        places = [order.index(axis) for axis in tokens if axis in sizes]
        if places != sorted(places):
            refuse(
                "m", list(layout.m), f"axes that come before {', '.join(tokens[1:])} in the mesh ({', '.join(order)})"
            )


def weight_placements(
    layout: GridLayout, mesh: DeviceMesh, transposed: bool = False, groups: int = 1
) -> list[Placement]:
    """W[N,K] on every mesh axis: N split by n, K by k, whole elsewhere.

    transposed: stored as [K,N]. groups: N is that many equal parts, each split on its own (fused q, k, v).
    """
    rows, columns = (1, 0) if transposed else (0, 1)
    split_n: Placement = Shard(rows) if groups == 1 else _StridedShard(rows, split_factor=groups)
    return [
        split_n if axis in layout.n else Shard(columns) if axis in layout.k else Replicate() for axis in names(mesh)
    ]


def bias_placements(layout: GridLayout, mesh: DeviceMesh, groups: int = 1) -> list[Placement]:
    """b[N] on every mesh axis: split by n, whole elsewhere."""
    split_n: Placement = Shard(0) if groups == 1 else _StridedShard(0, split_factor=groups)
    return [split_n if axis in layout.n else Replicate() for axis in names(mesh)]


def activation_placements(
    tokens: tuple[str, ...], features: tuple[str, ...], mesh: DeviceMesh
) -> tuple[Placement, ...]:
    """An activation [.., M, features] on every mesh axis; dimensions count from the end, so that any rank will do."""
    return tuple(
        Shard(-2) if axis in tokens else Shard(-1) if axis in features else Replicate() for axis in names(mesh)
    )


def names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh's axis names."""
    if mesh.mesh_dim_names is None:
        raise InputError("mesh: found no axis names; allowed: a DeviceMesh with mesh_dim_names")
    return tuple(mesh.mesh_dim_names)
