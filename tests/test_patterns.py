"""Patterns of a plan file say of every block what was chosen for it, and of nothing else."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.space.patterns import patterns, ranges


@settings(max_examples=400, deadline=None)
@given(start=st.integers(0, 1300), length=st.integers(0, 1300))
def test_ranges_match_the_numbers_of_a_run_and_no_other(start, length):
    found = list(ranges(start, start + length))
    # Numbers of every length around the run, and with zeros in front.
    numbers = [*range(start + length + 12), *range(9990, 10012), *range(99_990, 100_012)]
    matched = [number for number in numbers if any(fnmatchcase(str(number), each) for each in found)]
    assert matched == list(range(start, start + length))
    assert not any(fnmatchcase(f"0{number}", each) for number in numbers[:20] for each in found)


@settings(max_examples=400, deadline=None)
@given(start=st.integers(0, 999), length=st.integers(1, 999))
def test_ranges_are_few(start, length):
    assert len(list(ranges(start, start + length))) <= 2 * len(str(start + length))


def test_ranges_read_like_this():
    assert list(ranges(8, 23)) == ["[8-9]", "1[0-9]", "2[0-2]"]
    assert list(ranges(0, 10)) == ["[0-9]"]
    assert list(ranges(100, 200)) == ["1[0-9][0-9]"]
    assert list(ranges(7, 8)) == ["7"]


@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=8),
    suffix=st.sampled_from(("", ".mlp.down")),
)
def test_the_first_pattern_that_matches_says_what_was_chosen(runs, suffix):
    choices = [choice for choice, count in runs for _ in range(count)]
    found = patterns("model.layers", suffix, choices)
    for number, choice in enumerate(choices):
        name = f"model.layers.{number}{suffix}"
        assert next(each for pattern, each in found.items() if fnmatchcase(name, pattern)) == choice, name
        assert not any(fnmatchcase(name.replace("layers", "other"), pattern) for pattern in found)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ("", {}),
        ("aaa", {"h.*": "a"}),
        ("aab", {"h.2": "b", "h.*": "a"}),
        ("a" * 3 + "b" * 20, {"h.[0-2]": "a", "h.*": "b"}),
    ],
)
def test_the_usual_choice_is_said_of_all(choices, expected):
    assert list(patterns("h", "", choices).items()) == list(expected.items())
