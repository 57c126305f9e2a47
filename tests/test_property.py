"""Random products equal dense float64: 500 draws of everything that a site's layout and use can be (fuzz.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from support import draws, fuzz

DRAWS = [draws.make(0, number) for number in range(500)]


def test_the_draws_cover_what_they_should():
    counts = fuzz.modes(DRAWS)
    print("modes drawn: " + ", ".join(f"{mode} {count}" for mode, count in sorted(counts.items())))
    assert all(counts[mode] >= 50 for mode in ("blocking", "async", "ring")), counts
    for field in ("form", "tensor", "data", "save_x", "chunks", "reduce_dtype", "dtype", "recompute", "bias", "passes"):
        assert min(Counter(getattr(draw, field) for draw in DRAWS).values()) >= 20, field
    assert {len(draw.n) for draw in DRAWS} == {1, 2, 3}
    assert {draw.tensor for draw in DRAWS} == {1, 2, 3, 4, 8}
    assert sum(bool(draw.frozen) for draw in DRAWS) >= 100
    grids = [draw.layouts[0] for draw in DRAWS if draw.form == "any"]
    for operand, role in (("x", "n"), ("y", "k"), ("w", "m")):
        words = Counter(layout.word(operand, axis) for layout in grids for axis in getattr(layout, role))
        assert min(words.values()) >= 10 and len(words) == (2 if operand == "w" else 3), words
    assert any(len(layout.n) > 1 for layout in grids) and any(len(layout.axes) < 3 for layout in grids)
    assert sum(fuzz.twin(draw) is not None for draw in DRAWS) >= 20


def test_a_draw_can_be_replayed():
    for draw in DRAWS[:50]:
        assert draws.Draw.from_json(draw.to_json()) == draw


@pytest.mark.slow
def test_random_products_equal_dense():
    failures = [outcome.failure for outcome in fuzz.run(DRAWS) if outcome.failure]
    assert not failures, f"{len(failures)} of {len(DRAWS)} draws:\n" + "\n".join(failures[:5])
