"""Grids of real ranks that overlap: the same results as blocking, and what flies when (ACCEPTANCE A4, A7, A20)."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from shardwright.trace import Collective, Op, Wait
from support import draws, fuzz, grids
from support.grids import EVEN, GRIDS, UNEVEN, named, world
from support.marks import slow_at
from support.ranks import on_ranks


@pytest.mark.parametrize("overlap", ["async", "ring"])
@pytest.mark.parametrize("name", grids.DESIGNS)
def test_modes_agree_on_a_grid(name, overlap):
    """Same collectives in each phase, same results; all that travels for design 1 overlaps."""
    axes = GRIDS[0]
    for kind in grids.KINDS:
        plain = on_ranks(8, grids.run, grids.layout_of(name, kind, chunks=2), axes, EVEN)
        layout = grids.layout_of(name, kind, chunks=2, overlap=overlap)
        for (_, a, first), (error, b, second) in zip(plain, on_ranks(8, grids.run, layout, axes, EVEN), strict=True):
            assert error <= 1e-12
            assert all((one - other).abs().max() < 1e-13 for one, other in zip(a, b, strict=True))
            assert sorted(grids.logged(first)) == sorted(grids.logged(second))
            modes = {(c.phase, c.kind, c.axes): c.mode for c in second.collectives}
            if name == "grid-scatter":
                for phase, gathered, scattered in (
                    ("forward", layout.n, layout.k),
                    ("backward", layout.k, layout.n),
                ):
                    assert modes[phase, "all_gather", gathered] == overlap
                    assert modes[phase, "reduce_scatter", scattered] == overlap
                assert modes["backward", "all_gather", layout.n] == overlap
            assert modes["forward", "all_gather", layout.m] == "async"
            assert first.saved_bytes == second.saved_bytes
            assert sum(c.sent for c in first.collectives) == sum(c.sent for c in second.collectives)


@pytest.mark.parametrize("axes", slow_at((1,), GRIDS), ids=named)
@pytest.mark.parametrize("overlap", ["async", "ring"])
def test_design_1_overlapped_equals_dense(overlap, axes):
    for kind, (sizes, chunks) in itertools.product(grids.KINDS, ((UNEVEN, 0), (EVEN, 0), (UNEVEN, 3), ((5, 2, 3), 1))):
        layout = grids.layout_of("grid-scatter", kind, overlap=overlap, chunks=chunks)
        for error, _, trace in on_ranks(world(axes), grids.run, layout, axes, sizes, True, 2, 2, True):
            assert error <= 1e-12
            over = [c.axes for c in trace.collectives if c.phase == "forward" and c.kind == "reduce_scatter"]
            assert over == [layout.k] * 2 * (axes[layout.k[0]] > 1)  # one for each linear, whatever the feature chunks


def in_bfloat16(axes, kind, overlap, chunks, recompute):
    """A draw of design 1 whose twin in blocking mode must agree bit for bit (fuzz.errors raises where it does not)."""
    fields = grids.layout_of("grid-scatter", kind).to_dict()
    names = dict(zip(axes, ("data", "tensor", "depth"), strict=True))
    roles = {role: [names[axis] for axis in fields[role]] for role in "mnk"} | {"w": "sharded"}
    draw = next(draw for number in itertools.count() if (draw := draws.make(1, number)).form == "any")
    return dataclasses.replace(
        draw, roles=json.dumps(roles), overlap=overlap, chunks=chunks, recompute=recompute, dtype="bfloat16", k=24,
        data=axes["i"], tensor=axes["j"], depth=axes["l"], tokens=42, n=(20, 9), frozen=(), save_x="shard",
        reduce_dtype="same", bias=True, unused=False, passes=1, poison=True,
    )  # fmt: skip


@pytest.mark.parametrize("axes", GRIDS, ids=named)
def test_a4_modes_that_cut_alike_agree_bit_for_bit(axes):
    choices = itertools.product(grids.KINDS, ("async", "ring"), (1, 2, 3), (False, True))
    made = [in_bfloat16(axes, *choice) for choice in choices]
    assert all(fuzz.twin(draw) is not None for draw in made)
    on_ranks(world(axes), fuzz.check, made)


def whole_order(layout, axes):
    """What is issued, waited for and multiplied, in order."""
    _, _, trace = grids.run(layout, axes, EVEN)
    found = []
    for event in trace.events:
        if isinstance(event, Collective):
            found.append(("issue", event.phase, event.kind, event.axes))
        elif isinstance(event, Wait):
            found.append(("wait", event.phase, event.kind, event.axes))
        elif isinstance(event, Op) and "mm" in event.name:
            found.append(("product", event.phase))
    return found


@pytest.mark.parametrize("overlap", ["blocking", "async", "ring"])
def test_a20_gathers_of_w_and_x_fly_together(overlap):
    """W's gather is issued before X's and waited for after it; dW's reduction is issued last, waited for at the end."""
    for kind in grids.KINDS:
        layout = grids.layout_of("grid-scatter", kind, overlap=overlap)
        w, x = ("all_gather", layout.m), ("all_gather", layout.n)
        for order in on_ranks(8, whole_order, layout, GRIDS[0]):
            at = order.index
            issue_w, issue_x = at(("issue", "forward", *w)), at(("issue", "forward", *x))
            assert issue_w < issue_x < at(("wait", "forward", *w)) < at(("product", "forward"))
            issue_w, issue_dy = at(("issue", "backward", *w)), at(("issue", "backward", "all_gather", layout.k))
            assert issue_w < issue_dy < at(("wait", "backward", *w))
            if overlap == "async":
                assert at(("issue", "backward", *x)) < at(("wait", "backward", *w))
            dw = ("backward", "reduce_scatter", layout.m)
            products = [place for place, event in enumerate(order) if event[0] == "product"]
            assert max(products) < at(("issue", *dw)) < at(("wait", *dw))


@pytest.mark.parametrize("overlap", ["async", "ring"])
def test_a7_design_1_multiplies_while_y_and_dy_travel(overlap):
    for kind in grids.KINDS:
        layout = grids.layout_of("grid-scatter", kind, overlap=overlap)
        for order in on_ranks(8, whole_order, layout, GRIDS[0]):

            def places(*event, order=order):
                return [place for place, found in enumerate(order) if found == event]

            x, y = ("forward", "all_gather", layout.n), ("forward", "reduce_scatter", layout.k)
            products = places("product", "forward")
            assert products[0] < places("wait", *x)[0]  # the own rows of X, while the others come
            (sent,), landed = places("issue", *y), places("wait", *y)
            assert len(landed) == 4  # feature chunks
            for begun, landing in zip([sent, *landed], landed, strict=False):  # the next is sent when one has landed
                assert landing == landed[-1] or any(begun < product < landing for product in products)
            dy, x, dx = (("backward", "all_gather", layout.k), ("backward", "all_gather", layout.n),
                         ("backward", "reduce_scatter", layout.n))  # fmt: skip
            products, issued = places("product", "backward"), places("issue", *dx)[0]
            assert places("issue", *dy)[0] < products[0]
            if overlap == "async":
                assert places("issue", *dy)[0] < places("issue", *x)[0] < products[0] < places("wait", *dy)[0]
                assert max(places("wait", *dy) + places("wait", *x)) < issued
                after = order[issued + 1 :]
                assert after[0] == ("product", "backward") and ("wait", *dx) in after


def test_where_x_is_kept_gathered_y_travels_blocking():
    layout = grids.layout_of("grid-scatter", "column", overlap="async", save_x="gathered")
    for error, _, trace in on_ranks(8, grids.run, layout, GRIDS[0], EVEN):
        assert error <= 1e-12
        modes = {(c.phase, c.kind, c.axes): c.mode for c in trace.collectives}
        assert modes["forward", "all_gather", layout.n] == "async"
        assert modes["forward", "reduce_scatter", layout.k] == modes["backward", "all_gather", layout.k] == "blocking"
