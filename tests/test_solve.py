"""The integer program equals brute force over every mix, to the byte and to the bound (ACCEPTANCE E1, E3)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.solving.solve import Assignment, BlockOption, FixedCost, Program, fastest, leanest, peak_of, seconds_of

INSTANCES = 400
UNITS = {"bytes": 1, "KiB": 2**10, "odd MiB": 2**20 + 1, "odd GiB": 2**30 - 3}
"""What one step of a drawn size stands for: the solver must be exact at all of them."""

Instance = tuple[FixedCost, tuple[BlockOption, ...], int]


def option(rng: random.Random, name: str, unit: int, second: float) -> BlockOption:
    """A way whose block adds less than it needs at most; a recomputed one adds little and gives back more."""
    forward, backward = rng.randint(0, 9) * unit, rng.randint(-9, 9) * unit
    return BlockOption(
        name,
        rng.randint(1, 20) * second,
        rng.randint(0, 6) * unit,
        forward,
        forward + rng.randint(0, 9) * unit + rng.randint(0, 2),
        backward,
        max(0, backward) + rng.randint(0, 12) * unit + rng.randint(0, 2),
    )


def drawn(seed: int, unit: int | None = None) -> Instance:
    """A frame, up to 4 ways and up to 8 blocks."""
    rng = random.Random(seed)
    unit, second = unit or rng.choice(list(UNITS.values())), rng.choice((1.0, 1e-3, 3e-6))
    options = tuple(option(rng, str(k), unit, second) for k in range(rng.randint(1, 4)))
    before, between = rng.randint(0, 5) * unit, rng.randint(-3, 5) * unit
    fixed_cost = FixedCost(
        rng.choice((0.0, rng.random() * second)),
        rng.randint(0, 30) * unit,
        before,
        before + rng.randint(0, 20) * unit,
        between,
        max(0, between) + rng.randint(0, 20) * unit,
        rng.randint(0, 20) * unit,
    )
    return fixed_cost, options, rng.randint(1, 8)


def assignments(options: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``blocks`` as so many counts."""
    if options == 1:
        yield (blocks,)
        return
    for count in range(blocks + 1):
        yield from ((count, *rest) for rest in assignments(options - 1, blocks - count))


def alive(fixed_cost: FixedCost, options: tuple[BlockOption, ...], counts: tuple[int, ...]) -> int:
    """The peak of a mix, by walking through its blocks one by one: nothing is taken from the solver."""
    order = [option for option, count in zip(options, counts, strict=True) for _ in range(count)]
    now = fixed_cost.resident + sum(option.resident for option in order)
    seen = [now + fixed_cost.before_top]
    now += fixed_cost.before
    for each in order:
        seen.append(now + each.forward_top)
        now += each.forward
    seen.append(now + fixed_cost.between_top)
    now += fixed_cost.between
    for each in reversed(order):
        seen.append(now + each.backward_top)
        now += each.backward
    return max(*seen, now + fixed_cost.after_top)


def budgets(peaks: list[int]) -> list[int]:
    """At, one byte below and above the least, the middle and the largest peak, and a little less than fits."""
    few = sorted({min(peaks), sorted(peaks)[len(peaks) // 2], max(peaks)})
    return [peak + more for peak in few for more in (-1, 0, 1) if peak + more >= 0]


def check(
    instance: Instance, found: Assignment | None, budget: int, table: dict[tuple[int, ...], tuple[float, int]]
) -> None:
    fixed_cost, options, _ = instance
    fitting = [seconds for seconds, peak in table.values() if peak <= budget]
    assert (found is None) == (not fitting), (found, budget)
    if found is not None:
        assert found.seconds == pytest.approx(min(fitting), rel=1e-9), (found, budget)
        assert (found.seconds, found.peak) == (
            seconds_of(fixed_cost, options, found.counts),
            alive(fixed_cost, options, found.counts),
        )
        assert found.peak <= budget
        assert found.bound <= found.seconds
        assert found.bound == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("part", range(4))
def test_e1_the_fastest_mix_is_that_of_brute_force(part, capfd):
    tight = 0
    for seed in range(part, INSTANCES, 4):
        instance = fixed_cost, options, blocks = drawn(seed)
        program = Program(fixed_cost, options, blocks)  # one for all memory limits: no solve leaves a trace
        table = {
            counts: (seconds_of(fixed_cost, options, counts), alive(*instance[:2], counts))
            for counts in assignments(len(options), blocks)
        }
        fastest_of_all = min(seconds for seconds, _ in table.values())
        for budget in budgets([peak for _, peak in table.values()]):
            found = program.fastest(budget)
            check(instance, found, budget, table)
            tight += found is not None and found.seconds > fastest_of_all
        lean = program.leanest()
        assert lean.peak == alive(fixed_cost, options, lean.counts) == min(peak for _, peak in table.values()), seed
    assert tight > 50  # budgets that change the answer
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", [664, 1086])
def test_the_leanest_mix_is_so_to_the_byte(seed):
    """Instances whose two leanest mixes are closer than the solver's tolerance."""
    fixed_cost, options, blocks = drawn(seed)
    lean = leanest(fixed_cost, options, blocks)
    assert lean.peak == min(alive(fixed_cost, options, counts) for counts in assignments(len(options), blocks))


TIED = [
    (57, 2**30 - 3),
    (99, 2**30 - 3),
    (105, 1),
    (105, 2**20),
    (120, 1),
    *((seed, 2**20) for seed in range(9000, 9012)),
]
"""(seed, unit) of instances with many ways of equal costs, and of mixes that fill the budget to the byte.

The first two went wrong at looser tolerances, the next three from a start.
"""


@pytest.mark.parametrize(("seed", "unit"), TIED)
def test_ties_and_budgets_without_a_byte_to_spare(seed, unit):
    rng = random.Random(seed)
    check_tied(rng, unit, *rng.choice(((12, 3), (20, 2), (8, 4))))


def test_an_instance_that_went_wrong_without_presolve():
    check_tied(random.Random(3032), 2**20, 12, 3)


def check_tied(rng: random.Random, unit: int, options: int, blocks: int) -> None:
    some = tuple(option(rng, str(k), unit, 1e-3) for k in range(options))
    fixed_cost = FixedCost(1e-3, 4 * unit, unit, 2 * unit, unit, 4 * unit, 2 * unit)
    table = {
        each: (seconds_of(fixed_cost, some, each), alive(fixed_cost, some, each))
        for each in assignments(options, blocks)
    }
    least = min(peak for _, peak in table.values())
    assert leanest(fixed_cost, some, blocks).peak == least
    for budget in (least, least + unit, least + 4 * unit, least + 8 * unit, least + 9 * unit + 1):
        check((fixed_cost, some, blocks), fastest(fixed_cost, some, blocks, budget), budget, table)


def instances() -> st.SearchStrategy[Instance]:
    return st.builds(drawn, st.integers(10**6, 10**7))


@settings(max_examples=60, deadline=None)
@given(instance=instances(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_e3_a_larger_budget_is_never_slower(instance, shares):
    fixed_cost, options, blocks = instance
    peaks = [alive(fixed_cost, options, counts) for counts in assignments(len(options), blocks)]
    low, high = (min(peaks) + round((max(peaks) - min(peaks)) * share) for share in sorted(shares))
    slow, quick = fastest(fixed_cost, options, blocks, low), fastest(fixed_cost, options, blocks, high)
    assert slow is not None and quick is not None
    assert quick.seconds <= slow.seconds * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(instance=instances())
def test_the_peak_of_a_mix_is_that_of_its_blocks_one_by_one(instance):
    fixed_cost, options, blocks = instance
    for counts in assignments(len(options), blocks):
        assert peak_of(fixed_cost, options, counts) == alive(fixed_cost, options, counts)


def test_126_blocks_of_gibibytes_are_solved_to_the_byte():
    rng = random.Random(405)
    for _ in range(4):
        options = tuple(
            BlockOption(
                str(k),
                rng.uniform(0.01, 0.03),
                *(rng.randrange(2**29) for _ in range(2)),
                rng.randrange(2**29, 2**30),
                0,
                2**30,
            )
            for k in range(3)
        )
        fixed_cost = FixedCost(0.1, rng.randrange(2**33), 5, 2**20, 7, rng.randrange(2**32), rng.randrange(2**30))
        table = {
            counts: (seconds_of(fixed_cost, options, counts), alive(fixed_cost, options, counts))
            for counts in assignments(3, 126)
        }
        peaks = sorted(peak for _, peak in table.values())
        for budget in (peaks[0], peaks[0] - 1, peaks[len(peaks) // 3], peaks[len(peaks) // 2] - 1):
            check((fixed_cost, options, 126), fastest(fixed_cost, options, 126, budget), budget, table)
        assert leanest(fixed_cost, options, 126).peak == peaks[0]
