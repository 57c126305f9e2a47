"""The formulas of formulas/volume.py against what real ranks count: collectives, saved bytes and transients,
exactly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

import shardwright as sw
from shardwright.formulas.volume import Volume, site_volume
from shardwright.spec.layout import CHOICES
from shardwright.spec.site import Linear, Site
from support import dense, draws, fuzz, grids
from support.counting import counted
from support.marks import slow_at, slow_in
from support.ranks import on_ranks
from test_grid_linear import LAYOUTS, with_data


def mesh(data: int, tensor: int) -> tuple[tuple[str, int], ...]:
    return (("data", data), ("tensor", tensor))


SIZES = (1, 2, 3, 4, 8)
MESHES = [mesh(1, n) for n in SIZES] + [mesh(2, 2)]
EVEN, UNEVEN, SMALL = (48, 48, 48), (23, 13, 17), (3, 2, 5)  # tokens, K, N
FROZEN = ((), ("x",), ("w",), ("b",), ("x", "w"), ("w", "b"), ("x", "b"), ("w0",), ("x", "w0", "b0"))


@dataclass(frozen=True)
class Case:
    """A site on a mesh. frozen: as site_volume takes it."""

    layout: sw.GridLayout
    axes: tuple[tuple[str, int], ...]
    tokens: int
    k: int
    linears: tuple[Linear, ...]
    bias: bool = True
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def world(self) -> int:
        return torch.Size(size for _, size in self.axes).numel()


def measure(case: Case) -> tuple[Volume, Volume]:
    """(counted, formula) on this rank."""
    mesh = dense.mesh_of(**dict(case.axes))
    modules = [torch.nn.Linear(case.k, linear.n, bias=case.bias, dtype=case.dtype) for linear in case.linears]
    lins = sw.GridLinear.siblings(modules, case.layout, mesh, facts=case.linears)
    for i, lin in enumerate(lins):
        lin.weight.requires_grad_(not {"w", f"w{i}"} & set(case.frozen))
        if case.bias:
            lin.bias.requires_grad_(not {"b", f"b{i}"} & set(case.frozen))
    x = dense.part(torch.randn(case.tokens, case.k, dtype=case.dtype), mesh, lins[0].input_placements)
    x.requires_grad_("x" not in case.frozen)
    here = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    site = Site("site", "column", case.tokens, case.k, case.linears)
    rows = fuzz.rows_of(case.tokens, case.layout, mesh)
    with sw.record(torch.nn.ModuleList(lins), x) as trace:
        ys = [lin(x, tokens=rows) for lin in lins]
        ups = [torch.ones_like(y) for y in ys]
        used = [(y, up) for y, up in zip(ys, ups, strict=True) if y.requires_grad]
        if used:
            torch.autograd.backward([y for y, _ in used], [up for _, up in used])
    formula = site_volume(
        site, case.layout, dict(case.axes), here, element=case.dtype.itemsize, bias=case.bias, frozen=case.frozen
    )
    del used
    return counted(trace), formula


def compare(cases: Sequence[Case]) -> list[str]:
    """On a rank: one line for each number that differs."""
    found = []
    for case in cases:
        try:
            seen, told = measure(case)
        except Exception as error:
            raise AssertionError(f"{case}") from error
        for field in dataclasses.fields(Volume):
            a, b = getattr(seen, field.name), getattr(told, field.name)
            if a != b:
                found.append(f"{case}\n    {field.name}: counted {a}\n    {' ' * len(field.name)}  formula {b}")
    return found


def check(cases: Sequence[Case]) -> None:
    """Counted equals formula on every rank."""
    by_world: dict[int, list[Case]] = {}
    for case in cases:
        by_world.setdefault(case.world, []).append(case)
    for world, group in by_world.items():
        for rank, lines in enumerate(on_ranks(world, compare, group)):
            assert not lines, f"rank {rank}, {len(lines)} numbers of {len(group)} cases:\n" + "\n".join(lines[:5])


def plain(*widths: int) -> tuple[Linear, ...]:
    return tuple(Linear(f"l{i}", n) for i, n in enumerate(widths))


ALL = {
    **{name: with_data(layout) for name, layout in LAYOUTS.items()},
    "grid": sw.GridLayout(n=("tensor",), k=("data",)),
    "grid keep": sw.GridLayout(n=("tensor",), k=("data",), save_x="gathered"),
    "grid all-reduce": sw.GridLayout(n=("tensor",), k=("data",), x="replicated", y="replicated"),
}


@pytest.mark.parametrize("overlap", slow_in(["async"], CHOICES["overlap"]))
@pytest.mark.parametrize("name", ALL)
def test_every_mesh_shape_and_number_of_siblings(name, overlap):
    cut = itertools.cycle((1, 2, 0, 3))
    cases = [
        Case(dataclasses.replace(ALL[name], overlap=overlap, chunks=chunks), axes, tokens, k, linears, bias)
        for axes, (tokens, k, n) in itertools.product(MESHES, (EVEN, UNEVEN, SMALL))
        for linears, bias, chunks in ((plain(n), False, 0), (plain(n, 2 * n, n + 1), True, next(cut)))
    ]
    check(cases)


@pytest.mark.parametrize("overlap", slow_in(["async"], CHOICES["overlap"]))
@pytest.mark.parametrize("name", ALL)
def test_every_frozen_set(name, overlap):
    tokens, k, n = UNEVEN
    cases = [
        Case(dataclasses.replace(ALL[name], overlap=overlap), axes, tokens, k, plain(n, n + 2), True, frozen)
        for axes in (MESHES[2], MESHES[5])
        for frozen in FROZEN
    ]
    check(cases)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reduction_in_float32_and_other_element_sizes(dtype):
    cases = [
        Case(layout, axes, 23, 13, plain(17, 4), True, (), dtype)
        for base, overlap, word in itertools.product(ALL.values(), CHOICES["overlap"], CHOICES["reduce_dtype"])
        for layout, axes in itertools.product(
            (dataclasses.replace(base, overlap=overlap, reduce_dtype=word),), (MESHES[1], MESHES[2], MESHES[5])
        )
        if draws.supported(layout)
    ]
    assert {case.layout.reduce_dtype for case in cases} == {"same", "float32"}
    check(cases)


def test_heads_that_several_ranks_share_and_fused_parts():
    heads = (Linear("q", 32, unit=4), Linear("k", 8, unit=4, sharable=True), Linear("v", 8, unit=4, sharable=True))
    fused = (Linear("qkv", 96, unit=4, groups=3),)
    check(
        [
            Case(dataclasses.replace(ALL[name], overlap=overlap, chunks=chunks), axes, 22, 16, linears, True, frozen)
            for name in ("column all-reduce", "column keep", "column gather again")
            for overlap, chunks in itertools.product(CHOICES["overlap"], (0, 2))
            for linears, axes, frozen in (
                (heads, MESHES[3], ()),
                (heads, mesh(2, 4), ("x",)),
                (heads, MESHES[3], ("w1", "b2")),
                (fused, MESHES[3], ()),
                (fused, MESHES[5], ("x",)),
            )
        ]
    )


def from_draw(draw: draws.Draw) -> Case:
    (layout,) = draw.layouts
    frozen = tuple(name.removeprefix("0.") for name in draw.frozen)
    axes, dtype = tuple(draw.axes.items()), draws.DTYPES[draw.dtype]
    return Case(layout, axes, draw.tokens, draw.k, plain(*draw.n), draw.bias, frozen, dtype)


@pytest.mark.parametrize("first", slow_at((1, 2), [0, 100, 175]))
def test_random_draws(first):
    made = (draws.make(2, number) for number in range(first, first + (100 if first == 0 else 75)))
    check([from_draw(draw) for draw in made if not draw.two])


GRIDS = [
    (("i", 2), ("j", 2), ("l", 2)),
    (("i", 2), ("j", 1), ("l", 4)),
    (("i", 2), ("j", 3), ("l", 1)),
    (("i", 1), ("j", 2), ("l", 2)),
]
WORDS = {
    **{f"{name} {kind}": grids.layout_of(name, kind) for name in grids.DESIGNS for kind in grids.KINDS},
    "2d": grids.layout_of("grid-2d", "column"),
    "features out": sw.GridLayout(m="i", n="j", k="l", x="replicated", w="sharded", y="sharded-features"),
    "several axes a role": sw.GridLayout(n=("i", "j"), k="l", w="sharded"),
    "several axes split k": sw.GridLayout(k=("i", "j"), n="l", x="replicated"),
    "words by axis": sw.GridLayout(n=("i", "j"), k="l", x={"i": "replicated", "j": "sharded"}, y="replicated"),
    "words of y by axis": sw.GridLayout(n="i", k=("j", "l"), y={"j": "sharded", "l": "replicated"}),
    "hybrid": sw.GridLayout(m=("i", "j"), n="l", w={"i": "sharded", "j": "replicated"}),
    "fsdp": sw.GridLayout(m=("i", "j", "l"), w="sharded"),
    "idle": sw.GridLayout(m="j", k="l", w="sharded"),
}


def on_grids(name: str) -> list[Case]:
    """Every mode on every grid; the other choices change from case to case."""
    cut, kept = itertools.cycle((0, 1, 2, 0, 3)), itertools.cycle(itertools.product(("shard", "gathered"), repeat=2))
    frozen = itertools.cycle(((), ("x",), ("w0",), (), ("w",), ("x", "w1", "b0"), ()))
    cases = []
    for (axes, (tokens, k, n)), overlap in itertools.product(
        zip(GRIDS, (UNEVEN, SMALL, EVEN, UNEVEN), strict=True), CHOICES["overlap"]
    ):
        save_x, save_w = next(kept)
        layout = dataclasses.replace(WORDS[name], overlap=overlap, chunks=next(cut), save_x=save_x, save_w=save_w)
        cases.append(Case(layout, axes, tokens, k, plain(n, n + 2), True, next(frozen)))
    return cases


@pytest.mark.parametrize("name", WORDS)
def test_grids_in_every_mode(name):
    check(on_grids(name))
