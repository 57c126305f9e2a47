"""What is searched: variants of structures are plans that run as they are priced, and limits hold for them too."""

from __future__ import annotations

import dataclasses
import math

import pytest

import shardwright as sw
from shardwright.pricing.formula_bounds import FormulaBound
from shardwright.pricing.rehearsed_bounds import PartBound, RehearsedBound, joined, rehearsed_bounds_of
from shardwright.search.candidate import Candidate, priced_in
from shardwright.search.explore import candidates_of
from shardwright.search.neighbours import improved
from shardwright.simulate.timeline import timeline
from shardwright.space.space import CHUNKED, GRIDS, MODES, Mode, Structure
from shardwright.trace import Op
from support import tiny
from support.marks import slow_in
from support.planned import BLOCKS, SIZES, Here, cluster, problem
from test_families import FAMILIES

PLAIN = Structure(1, 1, 2, 2, "split", "replicate", False, 1)
"""Two by two ranks that split features."""

VARIANTS = {
    "attention flat": dataclasses.replace(PLAIN, grids=("flat", "grid")),
    "MLP flat, all-reduce": dataclasses.replace(PLAIN, grids=("grid", "flat"), stream="whole"),
    "l before j": dataclasses.replace(PLAIN, l_first=True),
    "data before replica": Structure(2, 2, 1, 1, "split", "parameters", False, 1, data_first=True),
    "one in flight": Structure(1, 2, 2, 1, "split", "parameters", False, 1, in_flight=1),
    "three in flight": Structure(1, 2, 2, 1, "split", "parameters", False, 1, in_flight=3),
    "all blocks a bin": Structure(1, 2, 2, 1, "split", "parameters", False, 2, bins=3),
    "two blocks a bin": Structure(1, 2, 2, 1, "split", "gradients", False, 2, bins=2),
}


@pytest.mark.parametrize("name", slow_in(["l before j", "three in flight", "data before replica"], VARIANTS))
def test_a_variant_is_priced_as_it_is_rehearsed(name):
    """Bytes always; seconds where all blocks were rehearsed (three), nearly where middle ones stand for more."""
    path = tiny.config_path(**SIZES | {"num_hidden_layers": 14}) if name.startswith("two blocks") else None
    asked, structure = problem(cluster(), path=path), VARIANTS[name]
    mode = structure.modes[-1]
    one = priced_in(asked, Candidate(structure, FormulaBound(0.0, 0, 0, 0.0, 0.0)), [mode], Here())
    assert one.assignment is not None and one.lean is not None
    plan = asked.plan(structure, one.blocks(one.assignment))
    assert (plan.mesh, plan.in_flight, plan.bucket > 0) == (structure.mesh, structure.in_flight, structure.bins > 0)
    trace = sw.rehearse(asked.config, plan)
    assert one.assignment.peak == trace.peak_bytes
    seconds = timeline(trace, asked.machine(structure), 2).seconds
    assert one.assignment.seconds == pytest.approx(seconds, rel=1e-9 if path is None else 1e-3)


def test_limits_with_floors_hold_for_variants():
    """Also where attention's bound and the MLP's are of two rehearsals, and where memory asks for recomputed blocks."""
    asked = problem(cluster(within=1e9, between=1e9))
    every = {each.structure: each for each in candidates_of(asked)}
    rehearsed_bounds = rehearsed_bounds_of(asked, every, Here(), math.inf, lambda line: None)
    leanest = Mode("blocking", "shard")
    for name in ("attention flat", "MLP flat, all-reduce", "three in flight"):
        structure = VARIANTS[name]
        rehearsed_bound = rehearsed_bounds.get(structure.split) or joined(structure.split, rehearsed_bounds)
        assert rehearsed_bound is not None
        priced = priced_in(asked, every[structure], [leanest], Here())
        assert priced.lean is not None
        for budget in (asked.memory, priced.lean.peak):
            assignment, above = (
                priced.within(budget),
                priced.formula_bound.above(rehearsed_bound, structure.accumulation, budget),
            )
            assert assignment is not None
            assert every[structure].formula_bound.seconds <= above.seconds <= assignment.seconds


def test_memory_that_is_short_raises_the_limit():
    """Blocks whose saved bytes have no room are recomputed, and their forward counts again."""
    formula_bound = FormulaBound(seconds=1.0, memory=100, inputs=40, beyond=0.5, recomputed=0.25)
    part = RehearsedBound(0.0, 4, (PartBound(0.6, 0.3, 20), PartBound(0.4, 0.2, 10)))
    roomy, tight = formula_bound.above(part, 1, 180), formula_bound.above(part, 1, 179)
    assert (roomy.seconds, tight.seconds) == (4.0, 4.5)  # four units save 4 · (30 − 10) bytes more than their inputs
    assert roomy.recomputed == tight.recomputed == 0.0
    assert formula_bound.above(part, 1, 0).seconds == 4.0 + 4 * 0.5
    assert (
        formula_bound.above(part, 3, 100).seconds == 4.0
    )  # of a third of the batch they save no more than their inputs


def test_orders_that_lie_alike_are_one():
    """On one host every order is the same; on two hosts of two the inner axis stays within a host."""
    asked = problem(cluster())
    found = [each.structure for each in candidates_of(asked)]
    assert len(set(found)) == len(found)
    grids = [each for each in found if (each.usual, each.grids, each.bins) == (PLAIN, GRIDS[0], 0)]
    assert sorted([*each.mesh] for each in grids) == [["data", "j", "l"], ["data", "l", "j"]]
    single = problem(cluster().model_copy(update={"hosts": 1, "devices_per_host": 4}))
    assert not any(each.structure.data_first or each.structure.l_first for each in candidates_of(single))


def test_another_order_that_lies_otherwise_has_its_own_variants():
    asked = problem(cluster().model_copy(update={"hosts": 4}))
    found = [each.structure for each in candidates_of(asked)]
    turned = [each for each in found if (each.data, each.l_first, each.level) == (2, True, "parameters")]
    assert {each.in_flight for each in turned} == {1, 2, 3}


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("stream", ["split", "whole"])
def test_what_a_floor_says_of_recomputing_is_what_it_adds(family, stream):
    """A replay needs neither the sums behind the last product nor a gather that backward makes anyway."""
    path = tiny.write_config({"model_type": family, **FAMILIES[family]})
    asked = problem(cluster(), sequence=32, path=path)
    structure = Structure(1, 2, 2, 1, stream, "replicate", False, 1)
    rehearsed_bound = rehearsed_bounds_of(asked, [structure], Here(), math.inf, lambda line: None)[structure.split]
    assert rehearsed_bound is not None
    mode, machine, seconds = Mode("blocking", "shard"), asked.machine(structure), {}
    for word in ("none", "block"):
        plan = asked.plan(structure, [(mode, mode, word)] * asked.config.num_hidden_layers)
        ops = [event for event in sw.rehearse(asked.config, plan, steps=1).events if isinstance(event, Op)]
        seconds[word] = sum(machine.operator(op.name, op.shapes) for op in ops if op.phase != "step")
    assert rehearsed_bound.units * rehearsed_bound.again == pytest.approx(seconds["block"] - seconds["none"], rel=1e-9)
    assert 0.9 * seconds["none"] < rehearsed_bound.seconds <= seconds["none"]


def test_modes_in_chunks_are_priced_where_the_overlap_has_them():
    assert {mode.chunks for mode in MODES} == {0}
    assert {(mode.overlap, mode.chunks) for mode in CHUNKED} == {("async", 2), ("async", 4), ("ring", 2)}
    asked = problem(cluster())
    site = asked.sites()[1]
    structure = Structure(1, 1, 4, 1, "split", "replicate", False, 1)
    assert structure.layout(site, Mode("ring", "shard", 2)).chunks == 2
    whole = dataclasses.replace(structure, stream="whole")
    assert {mode.overlap for mode in whole.modes} == {"blocking", "async"} and Mode("async", "shard", 4) in whole.modes


def test_beside_the_best_one_thing_is_changed_at_a_time():
    asked = problem(cluster())
    best = Structure(1, 2, 2, 1, "split", "parameters", False, 1)
    others = [Candidate(each, FormulaBound(0.0, 0, 0, 0.0, 0.0)) for each in best.variants(BLOCKS)]
    first = priced_in(asked, Candidate(best, others[0].formula_bound), [Mode("ring", "shard")], Here())
    found = improved(asked, first, others, Here(), math.inf, lambda line: None)
    more = dataclasses.replace(best, in_flight=3)
    further = dataclasses.replace(more, bins=BLOCKS)
    assert {each.structure for each in found} == {best, more, further}
    seconds = {each.structure: each.seconds for each in found}
    assert seconds[more] < seconds[best], "so what is beside it comes next"
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    one, bins = (dataclasses.replace(best, in_flight=1), dataclasses.replace(best, bins=BLOCKS))
    fewer = [each for each in others if each.structure in (one, bins)]
    roomy = {each.structure for each in improved(asked, first, fewer, Here(), math.inf, print)}
    assert roomy == {best, bins}, "fewer in flight free memory, of which there is enough"
    assert first.lean is not None
    short = dataclasses.replace(asked, memory=first.lean.peak)
    tight = priced_in(short, Candidate(best, others[0].formula_bound), [Mode("ring", "shard")], Here())
    assert {each.structure for each in improved(short, tight, fewer, Here(), math.inf, print)} == {best, one, bins}
    same = next(each for each in found if each.structure == best)
    assert set(same.tried) == {Mode("ring", "shard"), Mode("ring", "shard", 2)} and same.seconds <= first.seconds


def test_every_variant_differs_and_leads_back():
    for structure in (PLAIN, *VARIANTS.values()):
        every = [structure, *structure.variants(BLOCKS)]
        assert len({each.name for each in every}) == len(every) and sum(each.plain for each in every) == 1
        assert {each.usual for each in every} == {structure.usual}
