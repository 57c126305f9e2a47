"""The demo's candidates and its choice."""

from __future__ import annotations

import pytest

from shardwright._errors import DoesNotFit, InputError
from shardwright.demo.candidates import (
    DATA_LEVELS,
    MOST,
    Candidate,
    by_preference,
    enumerate_layouts,
    global_batch,
    reason,
)
from shardwright.trace import Alloc, Collective, Storage, Trace


def candidate(name: str, peak: int, sent: int) -> Candidate:
    events = [Alloc(1, "forward", 0), Collective(1, "forward", "", "all_reduce", ("data",), (0, 1), sent, sent)]
    return Candidate(
        {"data": 2, "tensor": 2}, name, "replicate", None, Trace(list(events), [Storage(peak, "parameter", "", "")])
    )


def test_four_ranks_have_nine_candidates() -> None:
    found = enumerate_layouts(4)
    assert found[:3] == [({"data": 4, "tensor": 1}, "replicate", level) for level in DATA_LEVELS]
    names = ["tensor-all-reduce", "sequence-parallel", "sequence-parallel-keep"]
    assert found[3:6] == [({"data": 2, "tensor": 2}, name, "replicate") for name in names]
    assert found[6:] == [({"data": 1, "tensor": 4}, name, "replicate") for name in names]


def test_a_level_is_that_of_every_candidate() -> None:
    assert {level for _, _, level in enumerate_layouts(4, "gradients")} == {"gradients"}
    assert len(enumerate_layouts(4, "gradients")) == 7


@pytest.mark.parametrize("ranks", range(1, 33))
def test_every_candidate_fills_the_ranks_and_divides_the_batch(ranks: int) -> None:
    found = enumerate_layouts(ranks)
    assert 1 <= len(found) <= MOST
    assert all(mesh["data"] * mesh["tensor"] == ranks for mesh, _, _ in found)
    assert global_batch(ranks) % ranks == 0


def test_global_batch_is_the_nearest_multiple() -> None:
    assert [global_batch(ranks) for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)] == [8, 8, 9, 8, 10, 6, 7, 8, 12, 16]


def test_fewest_bytes_sent_then_smaller_peak() -> None:
    slow, big, small, tight = (
        candidate("slow", 100, 50),
        candidate("big", 300, 10),
        candidate("small", 200, 10),
        candidate("tight", 90, 60),
    )
    everyone = [slow, big, small, tight]
    assert [c.layout for c in by_preference(everyone, None)] == ["small", "big", "slow", "tight"]
    assert [c.layout for c in by_preference(everyone, 100)] == ["slow", "tight"]
    assert "has the smallest peak" in reason(small, by_preference(everyone, None), 4, None)
    assert "of the 2 (out of 4) layouts that are possible and fit in 100 B" in reason(
        slow, by_preference(everyone, 100), 4, 100
    )


def test_nothing_fits_tells_the_smallest_peak_and_its_layout() -> None:
    with pytest.raises(DoesNotFit, match=r"90 B \(90 bytes\), of data=2,tensor=2 tight"):
        by_preference([candidate("big", 300, 10), candidate("tight", 90, 60)], 80)


def test_no_candidate_is_valid() -> None:
    with pytest.raises(InputError, match="heads"):
        by_preference([Candidate({"data": 1, "tensor": 3}, "x", refused="heads is 8; allowed: a multiple of 3")], None)
