"""The search: certified, exact by its own model, monotone in memory, and led by the network (ACCEPTANCE E2–E6)."""

from __future__ import annotations

import dataclasses
import re

import pytest

import shardwright as sw
from shardwright.errors import DoesNotFit, InputError
from shardwright.search.candidate import Candidate, priced_in
from shardwright.search.explore import FIRST, candidates_of
from shardwright.search.pareto import curve
from shardwright.search.search import search
from shardwright.solving.solve import fastest, peak_of, seconds_of
from shardwright.space.space import MODES, structures
from shardwright.spec.mesh import ranks_along
from support import tiny
from support.planned import SIZES, Here, cluster, problem, quick, searched  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("quick")


def sound(found) -> None:
    """The plan says what its rehearsal says, and how sure it is."""
    plan, trace = found.plan, sw.rehearse(found.plan.config_path, found.plan)
    assert found.composed.expected() == {
        "peak": trace.peak_bytes,
        "saved": trace.saved_bytes,
        "volume": trace.sent_bytes,
    }
    assert plan.predicted.peak == trace.phase_peaks
    assert (plan.predicted.saved, plan.predicted.volume) == (trace.saved_bytes, trace.sent_bytes)
    assert trace.peak_bytes <= found.problem.memory
    assert 0 < plan.bound <= plan.objective == found.assignment.seconds
    assert plan.gap == (plan.objective - plan.bound) / plan.objective
    assert plan.world_size == found.problem.devices
    assert plan.micro_batch * plan.accumulation == found.problem.global_batch


def test_e2_the_plan_is_certified():
    found = searched(problem(cluster()))
    sound(found)
    assert found.left == ()
    assert found.plan.gap == 0
    assert found.assignment.seconds == pytest.approx(found.plan.predicted.time, rel=1e-9), "all of its blocks are alike"


def test_a_level_that_is_asked_for_is_the_only_one_looked_at():
    found = searched(dataclasses.replace(problem(cluster()), level="parameters"))
    sound(found)
    assert {each.structure.level for each in (*found.looked_at, *found.left)} == {"parameters"}
    assert {stored.level for stored in found.plan.params.values()} == {"parameters"}
    with pytest.raises(InputError, match="level: found 'zero9'; allowed: replicate, optimizer"):
        sw.plan(found.plan.config_path, cluster(), global_batch=4, sequence=8, level="zero9")


@pytest.mark.slow
def test_every_structure_priced_none_is_faster_and_limits_are_limits():
    found = searched(problem(cluster()))
    priced = [priced_in(found.problem, each, MODES, Here()) for each in candidates_of(found.problem)]
    assert len(priced) > len(found.looked_at), "the search left none out"
    assert found.assignment.seconds <= min(each.seconds for each in priced) * (1 + 1e-9)
    assert found.bound <= min(each.seconds for each in priced)
    for each in priced:
        assert each.formula_bound.seconds <= each.seconds and each.formula_bound.memory <= each.lean.peak, (
            each.structure
        )


def test_what_was_priced_in_some_modes_only_is_bounded_by_its_limits():
    asked = problem(cluster())
    one = next(each for each in candidates_of(asked) if each.structure.tensor > 1)
    some = priced_in(asked, one, FIRST, Here())
    assert (some.has(MODES), some.bound) == (False, one.formula_bound.seconds)
    every = priced_in(asked, some, MODES, Here())
    assert every.has(MODES) and every.assignment is not None and every.bound == every.assignment.bound
    assert every.seconds <= some.seconds


def test_without_time_the_bound_still_holds():
    hasty, patient = search(problem(cluster()), seconds=0), searched(problem(cluster()))
    assert hasty.left and hasty.bound < hasty.assignment.seconds, "what was left promises more"
    assert hasty.bound <= patient.assignment.seconds <= hasty.assignment.seconds


def test_limits_count_tied_weights_once():
    path = tiny.config_path(**SIZES | {"vocab_size": 4096, "tie_word_embeddings": True})
    asked = problem(cluster(), batch=4, sequence=4, path=path)
    for each in candidates_of(asked):
        found = priced_in(asked, each, MODES[:1], Here())
        assert found.formula_bound.memory <= found.lean.peak and found.formula_bound.seconds <= found.seconds, (
            each.structure
        )


def test_e3_a_larger_memory_is_never_slower():
    roomy = searched(problem(cluster()))
    peak = roomy.certificate.peak_bytes
    times = [roomy.assignment.seconds]
    for share in (0.95, 0.9, 0.85):
        found = searched(problem(cluster(), memory=int(peak * share)))
        sound(found)
        times.append(found.assignment.seconds)
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_e3_what_does_not_fit_names_the_least_that_does():
    with pytest.raises(DoesNotFit) as error:
        searched(problem(cluster(), memory=1000))
    assert "\n" not in str(error.value)
    told = re.match(
        r"memory: found 1000 B \(1,000 bytes\) a device; allowed: .* \(([\d,]+) bytes\) at least, with ",
        str(error.value),
    )
    assert told, error.value
    least = int(told[1].replace(",", ""))
    sound(searched(problem(cluster(), memory=least)))
    with pytest.raises(DoesNotFit):
        searched(problem(cluster(), memory=least - 1))


@pytest.mark.slow
def test_without_time_it_is_not_said_that_nothing_fits():
    """What was not looked at is told, and the leanest by its limits is looked at whatever the time."""
    with pytest.raises(DoesNotFit) as patient:
        searched(problem(cluster(), memory=1000))
    with pytest.raises(DoesNotFit) as hasty:
        search(problem(cluster(), memory=1000), seconds=0)
    assert str(hasty.value) == str(patient.value) or "more structures, which may need less, were not" in str(
        hasty.value
    )
    asked = problem(cluster(), memory=64 * 2**20)
    leanest = min(candidates_of(asked), key=lambda each: each.formula_bound.memory)
    lean = priced_in(asked, leanest, MODES, Here()).lean
    assert lean is not None
    sound(search(dataclasses.replace(asked, memory=lean.peak + 2**16), seconds=0))


def test_a_level_that_needs_more_ranks_is_refused_in_one_line():
    asked = dataclasses.replace(problem(cluster()), devices=1, level="parameters")
    with pytest.raises(InputError, match="level: found 'parameters'; allowed: replicate, where no ranks of the 1"):
        candidates_of(asked)


def priced(mesh: dict[str, int]) -> Candidate:
    """The structure on this mesh that splits tokens, parameters whole, priced in every mode."""
    asked = problem(cluster(within=1e8, between=1e8))
    found = next(c for c in candidates_of(asked) if c.structure.mesh == mesh and c.structure.stream == "split")
    return priced_in(asked, found, MODES, Here())


def test_a_price_counts_what_every_micro_batch_holds(monkeypatch):
    """Three are rehearsed; the tokens of all are there from the start, and so are the losses of those before."""
    monkeypatch.setattr("shardwright.space.problem.structures", structures)
    asked = problem(cluster(), batch=32)
    whole = (c for c in candidates_of(asked) if c.structure.level == "replicate" and c.structure.stream == "split")
    found = next(c for c in whole if c.structure.mesh == {"data": 2, "tensor": 2} and c.structure.accumulation == 8)
    one = priced_in(asked, found, MODES[:1], Here())
    assert one.lean is not None
    plan = asked.plan(one.structure, one.blocks(one.lean))
    assert one.lean.peak == sw.rehearse(asked.config, plan).peak_bytes


def uniform(candidate: Candidate, budget: int) -> list[float]:
    """Seconds of the plans that fit and whose blocks all go one way, by brute force."""
    assert candidate.fixed_cost is not None
    fixed_cost, options, units = candidate.fixed_cost, candidate.options, candidate.units
    same = [tuple(units * (k == option) for k in range(len(options))) for option in range(len(options))]
    return [
        seconds_of(fixed_cost, options, counts) for counts in same if peak_of(fixed_cost, options, counts) <= budget
    ]


def test_e4_first_and_last_blocks_choose_differently_where_it_pays():
    one = priced({"data": 1, "tensor": 4})
    mixed = 0
    for point in curve([one]):
        assignment = one.within(point.peak)
        assert assignment is not None
        if sum(map(bool, assignment.counts)) > 1:
            mixed += 1
            assert assignment.seconds < min(uniform(one, point.peak), default=float("inf"))
    assert mixed >= 1


def test_e4_attention_and_mlp_choose_differently_where_it_pays():
    one = priced({"data": 1, "tensor": 4})
    assert one.fixed_cost is not None
    alike = [number for number, (attention, mlp, _) in enumerate(one.choices) if attention == mlp]
    apart = 0
    for point in curve([one]):
        assignment = one.within(point.peak)
        assert assignment is not None
        if any(count and number not in alike for number, count in enumerate(assignment.counts)):
            apart += 1
            other = fastest(one.fixed_cost, [one.options[number] for number in alike], one.units, point.peak)
            assert other is None or assignment.seconds < other.seconds
    assert apart >= 1


def chosen(within: float, between: float) -> dict[str, int]:
    """The mesh of the plan for links of so many bytes per second."""
    found = searched(problem(cluster(within, between)))
    return found.plan.mesh


def test_e6_slow_links_between_hosts_keep_features_within_a_host():
    mesh = chosen(within=1e9, between=1e8)
    assert mesh == {"data": 2, "tensor": 2}
    groups = {ranks_along(rank, ("tensor",), mesh) for rank in range(4)}
    assert {tuple(rank // 2 for rank in ranks) for ranks in groups} == {(0, 0), (1, 1)}


def test_e6_where_all_links_are_alike_it_differs():
    assert chosen(within=1e7, between=1e7) == {"data": 4, "tensor": 1}


def test_a_link_said_to_be_ten_times_too_fast_changes_the_plan():
    """Within hosts it draws the split of features there, between them the split of tokens over all."""
    assert chosen(within=1e7, between=1e7) == {"data": 4, "tensor": 1}
    assert chosen(within=1e8, between=1e7) == {"data": 2, "tensor": 2}
    assert chosen(within=1e9, between=1e8) == {"data": 2, "tensor": 2}
    assert chosen(within=1e9, between=1e9) == {"data": 4, "tensor": 1}
