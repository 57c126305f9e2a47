"""The lower bound of a product, the best grids, and what a rehearsal prints beside them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from rich.console import Console

import shardwright as sw
from shardwright.formulas.bounds import Grid, best_grid, grids, lower_bound, ratio
from shardwright.formulas.volume import site_volume
from shardwright.report.bounds import bounds_table
from shardwright.spec.site import Linear, Site
from support.grids import layout_of

LLAMAS = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}
VOCABULARY, KV = 128256, 1024
RANKS, TOKENS = (8, 64, 512), (8192, 65536, 1048576)


def products(name):
    """(N, K) of each site."""
    h, f = LLAMAS[name]
    return {"qkv": (h + 2 * KV, h), "o": (h, h), "gate_up": (2 * f, h), "down": (h, f), "head": (VOCABULARY, h)}


@pytest.mark.parametrize("name", LLAMAS)
def test_the_best_divisor_grid_is_within_15_percent_of_the_bound(name):
    for (n, k), ranks, m in itertools.product(products(name).values(), RANKS, TOKENS):
        moved, bound = best_grid(m, n, k, ranks).moved(m, n, k), lower_bound(m, n, k, ranks)
        assert 1 - 1e-9 <= ratio(moved, bound) <= 1.15, (n, k, ranks, m)


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        ((4096, 4096, 4096), Grid(2, 2, 2)),  # a cube: all three
        ((8192, 4096, 2048), Grid(4, 2, 1)),  # on the border between two cases, P = mn/k²
        ((8192, 4096, 2048), Grid(8, 4, 2)),
        ((65536, 1024, 1024), Grid(64, 1, 1)),  # P = m/n: tokens alone
        ((65536, 2048, 1024), Grid(8, 1, 1)),
        ((16384, 4096, 512), Grid(8, 2, 1)),
        ((8192, 2048, 256), Grid(16, 4, 1)),  # P above m/k
        ((1024, 4096, 16384), Grid(1, 4, 16)),
    ],
)
def test_the_bound_is_attained_where_a_divisor_grid_meets_the_real_optimum(sizes, grid):
    assert grid.moved(*sizes) == pytest.approx(lower_bound(*sizes, grid.ranks), rel=1e-12)
    assert best_grid(*sizes, grid.ranks).moved(*sizes) == pytest.approx(grid.moved(*sizes), rel=1e-12)


def memory_bound(m, n, k, ranks, words):
    """Words that a rank with room for ``words`` must move, to leading order."""
    return 2 * m * n * k / (ranks * math.sqrt(words))


def test_no_grid_moves_less_than_the_bound_and_its_cases_join():
    for sizes in itertools.product((96, 1000, 40000), repeat=3):
        for ranks in (1, 2, 6, 8, 27, 64):
            for grid in grids(ranks):
                assert grid.ranks == ranks
                assert grid.moved(*sizes) >= lower_bound(*sizes, ranks) * (1 - 1e-12) - 1e-9
    m, n, k = 1 << 20, 1 << 12, 1 << 8
    for border in (m / n, m * n / k**2):
        assert lower_bound(m, n, k, border * (1 - 1e-9)) == pytest.approx(lower_bound(m, n, k, border * (1 + 1e-9)))
    assert lower_bound(m, n, k, 1) == pytest.approx(0)
    words = 4 / 9 * (m * n * k / 10**9) ** (2 / 3)
    assert memory_bound(m, n, k, 10**9, words) == pytest.approx(3 * (m * n * k / 10**9) ** (2 / 3))


def test_the_formula_of_a_site_is_the_grids():
    """site_volume counts in bytes what Grid.moved tells in words; both passes move wX·(a−A) + wW·(b−B) + 2·(c−C)."""
    sizes, (m, n, k), e = {"i": 2, "j": 3, "l": 4}, (48, 72, 24), 4
    layout = sw.GridLayout(m="i", n="j", k="l", w="sharded")
    site, place = Site("site", "column", m, k, (Linear("site", n),)), {"i": 1, "j": 2, "l": 0}
    volume = site_volume(site, layout, sizes, place, element=e)
    assert sum(move.sent for move in volume.forward) == round(Grid(2, 3, 4).moved(m, n, k) * e)
    a, b, c = m * k / (2 * 4), n * k / (3 * 4), m * n / (2 * 3)
    held = (m * k / 24, n * k / 24, m * n / 24)
    for kept, weight in (("gathered", 2), ("shard", 3)):
        layout = sw.GridLayout(m="i", n="j", k="l", w="sharded", save_x=kept, save_w=kept)
        expected = weight * (a - held[0]) + weight * (b - held[1]) + 2 * (c - held[2])
        assert site_volume(site, layout, sizes, place, element=e).sent == round(expected * e)


def pair(h, tokens, q):
    """Bytes that h → 4h → h moves in a step on q³ ranks: as a grid of design 1, and with tokens alone split (FSDP)."""
    grid, flat = {"i": q, "j": q, "l": q}, {"i": q**3}
    up, down = (Site("", kind, tokens, k, (Linear("", n),)) for kind, n, k in (("column", 4 * h, h), ("row", h, 4 * h)))
    tensor = {
        up: sw.GridLayout(n="i", save_x="gathered"),
        down: sw.GridLayout(k="i"),
    }
    scatter = {
        up: sw.GridLayout(m="i", n="j", k="l", w="sharded", save_x="gathered", save_w="gathered"),
        down: sw.GridLayout(m="i", n="l", k="j", w="sharded", save_x="gathered", save_w="gathered"),
    }

    def sent(layouts, sizes):
        place = dict.fromkeys(sizes, 0)
        return sum(site_volume(site, layout, sizes, place, element=1).sent for site, layout in layouts.items())

    return sent(scatter, grid) / sent(tensor, flat)


@pytest.mark.parametrize("q", [2, 4])
def test_a_grid_pays_against_one_axis_where_theory_says(q):
    """The volume ratio of h → 4h → h is (5 + 4h/T)/(q² + q + 1): on 8 ranks 3D wins only for T > 2h."""
    h = 1024
    for tokens in (h // 4, h, 2 * h, 4 * h, 16 * h):
        assert pair(h, tokens, q) == pytest.approx((5 + 4 * h / tokens) / (q * q + q + 1), rel=1e-3)
    assert pair(h, 2 * h, 2) == pytest.approx(1, rel=1e-3)


def test_the_table():
    site = Site("model.layers.0.mlp.down", "row", 1, 4096, (Linear("", 4096),))
    console = Console(width=120, record=True)
    console.print(bounds_table([site, site], [8], [4096]))
    text = console.export_text()
    assert text.count("2×2×2") == 1 and "1.000" in text and "*.mlp.down" in text
    assert math.isinf(ratio(1, 0)) and ratio(0, 0) == 1


DOC = (Path(__file__).parents[1] / "docs" / "layouts.md").read_text(encoding="utf-8")
FLAT, CUBE = {"i": 8}, {"i": 2, "j": 2, "l": 2}
SHOWN = {
    "DDP": (sw.GridLayout(m="i"), FLAT),
    "FSDP": (sw.GridLayout(m="i", w="sharded"), FLAT),
    "FSDP, no reshard": (sw.GridLayout(m="i", w="sharded", save_w="gathered"), FLAT),
    "column, all-reduce": (sw.GridLayout(n="i", x="replicated"), FLAT),
    "column, gather again": (sw.GridLayout(n="i"), FLAT),
    "column, keep": (sw.GridLayout(n="i", save_x="gathered"), FLAT),
    "row, all-reduce": (sw.GridLayout(k="i", y="replicated"), FLAT),
    "row, reduce-scatter": (sw.GridLayout(k="i"), FLAT),
    "3D design 1": (layout_of("grid-scatter", "column"), CUBE),
    "3D design 2": (layout_of("grid-reduce", "column"), CUBE),
    "2D": (layout_of("grid-2d", "column"), {"i": 4, "j": 2}),
    "2.5D": (layout_of("grid-25d", "column"), {"i": 2, "d": 2, "j": 2}),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_figures_of_the_page_are_the_formulas(name):
    (layout, sizes), site = SHOWN[name], Site("", "column", 48, 72, (Linear("", 24),))
    volume = site_volume(site, layout, sizes, dict.fromkeys(sizes, 0), element=4)
    sent = [sum(move.sent for move in moves) for moves in (volume.forward, volume.backward)]
    figures = (*sent, volume.saved, volume.transient_forward, volume.transient_backward)
    assert f"| {name} | " + " | ".join(f"{figure:,}" for figure in figures) + " |" in DOC


@pytest.mark.parametrize("name", LLAMAS)
def test_the_ratios_of_the_page(name):
    for ranks in RANKS:
        cells = []
        for m in TOKENS:
            found = []
            for site, (n, k) in products(name).items():
                grid = best_grid(m, n, k, ranks)
                found.append((ratio(grid.moved(m, n, k), lower_bound(m, n, k, ranks)), site, grid))
            worst, site, grid = max(found, key=lambda entry: entry[0])
            cells.append(f"{worst:.3f} ({site}, {grid.m}×{grid.n}×{grid.k})")
        assert f"| {name} | {ranks} | " + " | ".join(cells) + " |" in DOC


def test_a_wide_layer_with_few_tokens_splits_its_width_alone():
    """256 → 1,000,000, 64 tokens, 8 ranks: the best grid is one axis, at the bound."""
    grid = best_grid(64, 1_000_000, 256, 8)
    assert grid == Grid(1, 8, 1)
    assert grid.moved(64, 1_000_000, 256) == pytest.approx(lower_bound(64, 1_000_000, 256, 8))
