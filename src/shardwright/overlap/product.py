"""Product: what one site's products need to know about the mesh, worked out once from the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.comm.groups import AxisGroup
from shardwright.errors import InputError
from shardwright.runtime.reduction import Reduction
from shardwright.runtime.runtime import Runtime
from shardwright.spec.layout import GridLayout
from shardwright.spec.resolved import Resolved, resolve


@dataclass(frozen=True)
class Product:
    """Y_i[M,N_i] = X[M,K] · W_i[N_i,K]ᵀ on the mesh, as this rank sees it.

    gather_x: the n axes on which X comes in parts: gathered before use, dX reduce-scattered. x_by_features: the parts
        are of its features, else of its tokens.
    reduce_dx: the n axes on which X is whole: dX all-reduced (after it was scattered over the others).
    scatter_y, y_by_features, reduce_y: the same of Y over the k axes: reduce-scattered, then all-reduced.
    gathers_w: W is gathered for this site alone, and let go as soon as the site has read it.
    keep_gathered: backward keeps the gathered X (else what came in, and gathers it again).
    tokens_group: the ranks among which tokens are cut into pieces.
    resolved: what overlaps, and what is cut into how many pieces (spec/resolved.py).
    wide: low-precision partial sums are added in fp32.
    """

    name: str
    layout: GridLayout
    runtime: Runtime
    gather_x: AxisGroup
    x_by_features: bool
    reduce_dx: AxisGroup
    scatter_y: AxisGroup
    y_by_features: bool
    reduce_y: AxisGroup
    gathers_w: bool
    keep_gathered: bool
    tokens_group: AxisGroup
    resolved: Resolved
    wide: bool

    @classmethod
    def of(cls, name: str, layout: GridLayout, mesh: DeviceMesh) -> Product:
        """Raises InputError for a layout that this version does not run, naming the field."""
        runtime = Runtime.of(mesh)
        check_supported(layout, runtime.sizes, name)
        gather_x, x_by_features = _split_by(layout, "x", runtime)
        scatter_y, y_by_features = _split_by(layout, "y", runtime)
        reduce_dx = runtime.group(layout.axes_where("x", "replicated"))
        reduce_y = runtime.group(layout.axes_where("y", "replicated"))
        gathers = gather_x.size > 1 and not x_by_features
        scatters = scatter_y.size > 1 and not y_by_features
        return cls(
            name=name,
            layout=layout,
            runtime=runtime,
            gather_x=gather_x,
            x_by_features=x_by_features,
            reduce_dx=reduce_dx,
            scatter_y=scatter_y,
            y_by_features=y_by_features,
            reduce_y=reduce_y,
            gathers_w=runtime.group(layout.axes_where("w", "sharded")).size > 1,
            keep_gathered=layout.save_x == "gathered",
            tokens_group=gather_x if gathers else scatter_y if scatters else runtime.group(()),
            resolved=resolve(layout, runtime.sizes),
            wide=layout.reduce_dtype == "float32",
        )

    @property
    def splits_k(self) -> bool:
        """Y comes out of the product as a partial sum."""
        return self.reduction.needed

    @property
    def reduction(self) -> Reduction:
        """How it ends."""
        return Reduction(self.runtime, self.scatter_y, self.y_by_features, self.reduce_y, self.name, self.wide)

    def shape_in(self, rows: int, width: int) -> tuple[int, int]:
        """[R, K''] of X as it comes, of [T, K'] as it is multiplied."""
        return _part(self.gather_x, self.x_by_features, rows, width)

    def shape_out(self, rows: int, width: int) -> tuple[int, int]:
        """[S, N''] of Y as it goes, of [T, N'] as the product makes it."""
        return _part(self.scatter_y, self.y_by_features, rows, width)


def _split_by(layout: GridLayout, operand: str, runtime: Runtime) -> tuple[AxisGroup, bool]:
    """The axes on which the operand is held in parts, and whether those are parts of its features."""
    features = layout.axes_where(operand, "sharded-features")
    return runtime.group(features or layout.axes_where(operand, "sharded")), bool(features)


def _part(group: AxisGroup, by_features: bool, rows: int, width: int) -> tuple[int, int]:
    start, stop = group.bounds(width if by_features else rows)
    return (rows, stop - start) if by_features else (stop - start, width)


def check_supported(layout: GridLayout, sizes: Mapping[str, int], name: str) -> None:
    """Raises InputError where this version does not run the layout on a mesh of ``sizes``, naming the field.

    Tokens and features are cut axis after axis in mesh order, as DTensor cuts them, and the role that an operand needs
    is cut before the one that it misses. So m comes before the axes that scatter tokens, and before features that are
    scattered come those that split them for good (k of X, n of Y).
    """

    def refuse(field: str, found: object, allowed: str) -> None:
        raise InputError(f"{name or 'linear'}: layout.{field}: found {found!r}; allowed: {allowed}")

    order = ", ".join(sizes)
    for role in ("m", "n", "k"):
        for axis in getattr(layout, role):
            if axis not in sizes:
                refuse(role, axis, f"the mesh's axes ({order})")
    if resolve(layout, sizes).travels and layout.reduce_dtype != "same":
        refuse("reduce_dtype", layout.reduce_dtype, "same with overlap: ring, whose sums travel in their own dtype")
    for operand, role in (("x", "k"), ("y", "n")):
        by_tokens, by_features = (layout.axes_where(operand, word) for word in ("sharded", "sharded-features"))
        if by_tokens and by_features:
            refuse(operand, dict(getattr(layout, operand)), "sharded or sharded-features, not both")
        for field, then in (("m", by_tokens), (role, by_features)):
            first = getattr(layout, field)
            places = [list(sizes).index(axis) for axis in (*first, *then) if axis in sizes]
            if first and then and max(places[: len(first)]) > min(places[len(first) :]):
                refuse(field, list(first), f"axes that come before {', '.join(then)} in the mesh ({order})")


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
    """b[N] on every mesh axis: split as the features of Y are, whole elsewhere."""
    split_n: Placement = Shard(0) if groups == 1 else _StridedShard(0, split_factor=groups)
    return [split_n if axis in layout.output_feature_axes else Replicate() for axis in names(mesh)]


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
