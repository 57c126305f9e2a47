"""What memory buys: the curve of mixes that no other beats in both, and the steps down it (ACCEPTANCE E8)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwright.pricing.formula_bounds import FormulaBound
from shardwright.report.planning import curve_table
from shardwright.search.candidate import Candidate
from shardwright.search.pareto import FINEST, Knob, Point, curve, knobs
from shardwright.solving.solve import fastest
from shardwright.space.space import MODES, Structure
from test_solve import alive, assignments, drawn, seconds_of

STRUCTURE = Structure(1, 2, 2, 1, "split", "replicate", False, 1)


def candidate(seed: int, data: int = 2) -> Candidate:
    """A structure with drawn ways, all sizes below 200 bytes, so that the curve has every point."""
    fixed_cost, options, blocks = drawn(seed, unit=1)
    choices = tuple((MODES[0], MODES[0], "none") for _ in options)
    structure = replace(STRUCTURE, data=data)
    return Candidate(structure, FormulaBound(0.0, 0, 0, 0.0, 0.0), (), fixed_cost, options, choices, blocks)


def beaten_by_none(candidates: list[Candidate], most: float) -> list[tuple[float, int]]:
    """(seconds, peak) of every mix that no other beats, by brute force; fastest first."""
    found = []
    for each in candidates:
        assert each.fixed_cost is not None
        for counts in assignments(len(each.options), each.units):
            found.append(
                (seconds_of(each.fixed_cost, each.options, counts), alive(each.fixed_cost, each.options, counts))
            )
    kept: list[tuple[float, int]] = []
    for seconds, peak in sorted((seconds, peak) for seconds, peak in found if peak <= most):
        if not kept or peak < kept[-1][1]:
            if kept and seconds == pytest.approx(kept[-1][0], rel=1e-12):
                kept.pop()
            kept.append((seconds, peak))
    return kept


@pytest.mark.parametrize("seed", range(12))
def test_the_curve_is_that_of_brute_force(seed):
    both = [candidate(seed), candidate(1000 + seed, data=4)]
    expected = beaten_by_none(both, float("inf"))
    points = curve(both, finest=10**6)
    assert [point.peak for point in points] == [peak for _, peak in expected]
    assert [point.seconds for point in points] == pytest.approx([seconds for seconds, _ in expected], rel=1e-9)
    middle = expected[len(expected) // 2][1]
    assert [point.peak for point in curve(both, middle, finest=10**6)] == [
        peak for _, peak in beaten_by_none(both, middle)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_it_falls_from_the_fastest_to_the_leanest(seed):
    one = candidate(seed)
    points = curve([one])
    assert all(a.seconds < b.seconds and a.peak > b.peak for a, b in pairwise(points))
    assert one.fixed_cost is not None
    unlimited = fastest(one.fixed_cost, one.options, one.units, 2**40)
    assert unlimited is not None and points[0].seconds == unlimited.seconds


def test_points_closer_than_a_share_are_one():
    one = candidate(3)
    assert one.fixed_cost is not None
    far = replace(
        one, fixed_cost=replace(one.fixed_cost, resident=one.fixed_cost.resident + 10**6)
    )  # all peaks are nearly alike
    points = curve([far])
    assert len(points) <= 2 < len(curve([one]))
    for above, below in pairwise(points[:-1]):
        assert above.peak - below.peak >= above.peak // FINEST


def test_what_was_not_priced_has_no_point():
    assert curve([Candidate(STRUCTURE, FormulaBound(1.0, 1, 0, 0.0, 0.0))]) == ()
    assert curve([candidate(0)], memory=0) == ()


def test_knobs_are_ranked_by_what_a_millisecond_buys():
    gib = 2**30
    a, b, c = (Point(peak * gib, ms / 1e3, "s", "b") for peak, ms in ((9, 1.0), (8, 5.0), (4, 6.0)))
    assert knobs((a, b, c)) == (Knob(4 * gib, c.seconds - b.seconds, c), Knob(gib, b.seconds - a.seconds, b))
    assert [knob.gib_per_ms for knob in knobs((a, b, c))] == pytest.approx([4.0, 0.25])
    assert knobs((a,)) == knobs(()) == ()


def test_the_table_tells_the_ends_of_straight_stretches_and_the_plan():
    """Of six points the second and third lie between others of their structure, on a line; the plan is told though."""
    gib = 2**30
    line = [Point((10 - n) * gib, 1.0 + n * 0.5, "a", f"{n}") for n in range(4)]
    bent = Point(6 * gib, 3.4, "a", "4")
    points = (*line, bent, Point(5 * gib, 3.5, "b", "5"))
    for chosen, told in ((points[0], "0345"), (points[2], "02345")):
        table = curve_table(points, knobs(points), chosen)
        assert "".join(table.columns[5].cells) == told
        assert [*table.columns[3].cells][told.index(chosen.blocks)] == "the plan"
