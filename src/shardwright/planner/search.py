"""The search: structures in the order of what their formulas promise, each priced by rehearsals and solved exactly.

for each structure, most promising first:
    leave it out if no plan of it can beat the best one found, or fit
    rehearse a few blocks in each mode, on several processes
    solve for the fastest mix of modes, attention and MLP apart, and recomputed blocks
the bound is the least of: the best structure's own bound, and what structures not looked at promise at best
compose the winner to the byte; where it is over the budget after all, take the overshoot off and solve again
certify: rehearse the plan itself
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright._errors import DoesNotFit, InputError
from shardwright._files import format_bytes
from shardwright._plan import Plan
from shardwright.cluster import Cluster
from shardwright.cost.machine import Machine
from shardwright.models import Family, family_of
from shardwright.planner.certify import Certificate, certify
from shardwright.planner.classes import rank_classes
from shardwright.planner.compose import Composed, Unit, compose
from shardwright.planner.limits import Limits, limits
from shardwright.planner.pieces import cut
from shardwright.planner.price import Price, Priced, floor, plan_of, price
from shardwright.planner.solve import Frame, Mix, Way, fastest, leanest
from shardwright.planner.space import MODES, Mode, Structure, structures
from shardwright.planner.stretch import kinds, rehearse_few, runs, shortened
from shardwright.site import Site
from shardwright.trace.timeline import timeline

FIRST = (Mode("async", "gathered"), Mode("async", "shard"), Mode("ring", "shard"))
"""Modes in which every structure is priced; the best one is priced in all of them."""

ATTEMPTS = 6
"""How often a mix that is over the budget to the byte is solved again."""

Choice = tuple[Mode, Mode, str]
"""(mode of attention, mode of MLP, recomputation) of a block."""


@dataclass(frozen=True)
class Problem:
    """What the search is asked: a model, the devices, and the sizes that are given.

    batch: sequences of a step, over the whole mesh. memory: bytes that a device may hold.
    """

    config: Any
    base: Plan
    cluster: Cluster
    devices: int
    memory: int
    batch: int

    @property
    def family(self) -> Family:
        """The model's rule table."""
        return family_of(self.config)

    def sites(self, accumulation: int = 1) -> tuple[Site, ...]:
        """The sites of one micro-batch."""
        return self.family.sites(self.config, self.batch // accumulation * self.base.sequence)

    def machine(self, structure: Structure) -> Machine:
        """The devices as a mesh of this structure."""
        stored = self.base.master_dtype or self.base.dtype
        return Machine(self.cluster, structure.mesh, self.base.dtype, self.base.backend, stored)

    def plan(self, structure: Structure, choices: Sequence[Choice]) -> Plan:
        """The plan of a structure and its blocks' choices."""
        return plan_of(structure, self.base, self.family, self.sites(structure.accumulation), choices)


@dataclass(frozen=True)
class Candidate:
    """A structure, what its formulas promise, and, once it was looked at: prices, frame, ways and their choices.

    mix: the fastest within the budget, or None. lean: the one that needs least memory.
    """

    structure: Structure
    limits: Limits
    prices: tuple[Priced, ...] = ()
    frame: Frame | None = None
    ways: tuple[Way, ...] = ()
    choices: tuple[Choice, ...] = ()
    units: int = 0
    period: int = 1
    mix: Mix | None = None
    lean: Mix | None = None

    @property
    def seconds(self) -> float:
        """Of the fastest mix that fits; infinite where none does."""
        return self.mix.seconds if self.mix else float("inf")

    def blocks(self, mix: Mix) -> list[Choice]:
        """What each block of the model chooses."""
        return [
            choice for choice, count in zip(self.choices, mix.counts, strict=True) for _ in range(count * self.period)
        ]

    def within(self, budget: int) -> Mix | None:
        """The fastest mix of this structure within ``budget`` bytes."""
        if self.frame is None:
            return None
        return fastest(self.frame, self.ways, self.units, budget)


@dataclass(frozen=True)
class Found:
    """The answer: a certified plan, the candidate that it comes from, and all others.

    composed: what was predicted before the rehearsal. looked_at: candidates that were priced, best first. left:
    promising least first, those that were not. bound: seconds that no plan of the space can beat, by the model.
    """

    problem: Problem
    plan: Plan
    candidate: Candidate
    mix: Mix
    composed: Composed
    certificate: Certificate
    looked_at: tuple[Candidate, ...]
    left: tuple[Candidate, ...]
    bound: float
    spent: float = field(compare=False)


Tell = Callable[[str], None]


def search(
    problem: Problem, seconds: float = 40.0, workers: int | None = None, tell: Tell = lambda line: None
) -> Found:
    """The fastest certified plan that fits.

    seconds: how long structures may be priced; composing and certifying come on top. workers: processes that rehearse
    (default: the machine's processors). tell: takes lines of progress.
    Raises DoesNotFit where nothing fits, naming the least budget that works and what it gives up.
    """
    started = time.monotonic()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    candidates = candidates_of(problem)
    with _pool(workers) as pool:
        looked_at, left = _explore(problem, candidates, pool, started + seconds, tell)
        fitting = [candidate for candidate in looked_at if candidate.mix]
        if not fitting:
            raise DoesNotFit(_least(problem, _leaner(problem, candidates, looked_at, pool, started + seconds)))
        best = min(fitting, key=lambda candidate: candidate.seconds)
        tell(f"{best.structure.name}: all modes")
        best = _price_all(problem, best, MODES, pool)
    looked_at = sorted((best, *(each for each in looked_at if each.structure != best.structure)), key=_order)
    while True:
        best = looked_at[0]
        if best.mix is None:
            raise DoesNotFit(_least(problem, looked_at))
        tell(f"{best.structure.name}: composing")
        settled = _settle(problem, best)
        if settled is not None:
            break
        looked_at = sorted((replace(best, mix=None), *looked_at[1:]), key=_order)
    mix, composed, plan = settled
    tell(f"{best.structure.name}: certifying")
    certificate = certify(problem.config, plan, composed.expected())
    assert best.mix is not None
    bound = min(
        [best.mix.bound, *(candidate.limits.seconds for candidate in left), *(c.seconds for c in looked_at[1:])]
    )
    bound = min(bound, mix.seconds)
    predicted = certificate.predicted()
    trace = max(certificate.traces.values(), key=lambda each: each.peak_bytes)
    predicted["time"] = timeline(trace, problem.machine(best.structure), 2).seconds
    plan = certificate.written(plan).evolve(
        predicted=predicted, objective=mix.seconds, bound=bound, gap=(mix.seconds - bound) / mix.seconds
    )
    return Found(
        problem,
        plan,
        best,
        mix,
        composed,
        certificate,
        tuple(looked_at),
        tuple(left),
        bound,
        time.monotonic() - started,
    )


def candidates_of(problem: Problem) -> list[Candidate]:
    """Every structure with its limits, most promising first. Raises InputError where there is none."""
    base, family = problem.base, problem.family
    found: list[Candidate] = []
    sizes: dict[str, int] = {}
    machines: dict[tuple[tuple[str, int], ...], Machine] = {}  # each works out how its groups lie over hosts
    by_accumulation: dict[int, list[Site]] = {}
    blocks = problem.config.num_hidden_layers
    for structure in structures(family, problem.config, problem.devices, problem.batch, base.sequence):
        sites = by_accumulation.get(structure.accumulation)
        if sites is None:
            sites = by_accumulation[structure.accumulation] = _distinct(problem, structure.accumulation)
            sizes = {site.name: site.n * site.k for site in sites}
        machine = machines.setdefault(tuple(structure.mesh.items()), problem.machine(structure))
        stored = base.master_dtype or base.dtype
        found.append(
            Candidate(structure, limits(structure, sites, blocks, sizes, machine, base.dtype, stored, problem.memory))
        )
    if not found:
        raise InputError(
            f"batch: found {problem.batch} sequences on {problem.devices} devices; allowed: a multiple of the devices "
            "that are left when features are split as the heads allow"
        )
    return sorted(found, key=_promise)


def _distinct(problem: Problem, accumulation: int) -> list[Site]:
    """The embedding, the sites of the first block, the head."""
    sites = problem.sites(accumulation)
    first = [site for site in sites if site.name.startswith(f"{problem.family.blocks}.0.")]
    return [sites[0], *first, sites[-1]]


# -- exploring --------------------------------------------------------------------------------------------------------


def _explore(
    problem: Problem, candidates: Sequence[Candidate], pool: Executor, until: float, tell: Tell
) -> tuple[list[Candidate], list[Candidate]]:
    """(candidates that were priced, those that were neither priced nor ruled out)."""
    fitting = [each for each in candidates if each.limits.memory <= problem.memory]
    chosen = fitting or sorted(candidates, key=lambda each: each.limits.memory)[:2]
    tell(f"{len(candidates)} structures, {len(fitting)} of them within the budget by their parameters")
    looked_at: list[Candidate] = []
    left: list[Candidate] = []
    best, halfway = float("inf"), (time.monotonic() + until) / 2
    for first in (True, False):  # the first that fits sets a mark; only what may beat it is worth a floor
        if not first:
            chosen = _with_floors(problem, [each for each in chosen if each.limits.seconds < best], pool, halfway, tell)
        for number, candidate in enumerate(chosen):
            if candidate.limits.seconds >= best or any(each.structure == candidate.structure for each in looked_at):
                continue  # proven: no plan of it beats the best one
            if not first and time.monotonic() > until:
                left.append(candidate)
                continue
            tell(f"structure {number + 1} of {len(chosen)}: {candidate.structure.name}")
            priced = _price_all(problem, candidate, _worth(candidate, looked_at), pool)
            if priced.frame is not None:
                looked_at.append(priced)
                best = min(best, priced.seconds)
            if first and (priced.mix or time.monotonic() > until):
                break
    return looked_at, [each for each in left if each.limits.seconds < best]


def _with_floors(
    problem: Problem, candidates: Sequence[Candidate], pool: Executor, until: float, tell: Tell
) -> list[Candidate]:
    """Candidates with what their operators alone take, most promising first, without those that the runtime refuses.

    The level and the axes that split storage change no operator but the optimizer's; more micro-batches cut the same
    work into smaller operators, which take no less. So the structure with the fewest micro-batches, in blocking mode,
    whose products are not cut, shows a bound for all that share its features' axes and stream.
    """
    probes: dict[tuple[int, int, str], Structure] = {}
    for each in sorted(candidates, key=lambda each: (each.structure.accumulation, _promise(each))):
        probes.setdefault(_kind(each.structure), each.structure)
    guesses = {kind: min(_promise(each) for each in candidates if _kind(each.structure) == kind) for kind in probes}
    tasks = {
        kind: pool.submit(_floor, (problem, probes[kind])) for kind in sorted(probes, key=lambda kind: guesses[kind])
    }
    floors: dict[tuple[int, int, str], float | None] = {}
    for kind, task in tasks.items():
        if time.monotonic() < until or task.done():
            tell(f"floor {len(floors) + 1} of {len(tasks)}: {probes[kind].name}")
            floors[kind] = task.result()
        else:
            task.cancel()
    found = []
    for each in candidates:
        known = each.limits
        floor = floors.get(_kind(each.structure), known.seconds)
        if floor is not None:
            found.append(replace(each, limits=replace(known, seconds=max(floor, known.seconds))))
    return _by_kind(sorted(found, key=_promise))


def _by_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of each kind in their order, then the others: the guess is surer within a kind than between kinds."""
    firsts: dict[tuple[int, int, str], Structure] = {}
    for each in candidates:
        firsts.setdefault(_kind(each.structure), each.structure)
    return sorted(candidates, key=lambda each: firsts[_kind(each.structure)] != each.structure)  # a stable sort


def _promise(candidate: Candidate) -> tuple[float, int]:
    """A likely time, and how little memory."""
    return candidate.limits.seconds + candidate.limits.beyond, candidate.limits.memory


def _kind(structure: Structure) -> tuple[int, int, str]:
    return structure.j, structure.l, structure.stream


def _worth(candidate: Candidate, looked_at: Sequence[Candidate]) -> Sequence[Mode]:
    """The modes to price: where blocks of that kind have been priced, those that were chosen then."""
    alike = [
        each
        for each in looked_at
        if _kind(each.structure) == _kind(candidate.structure) and each.mix and each.structure.tensor > 1
    ]
    if not alike:
        return FIRST
    best = min(alike, key=lambda each: each.seconds)
    assert best.mix is not None
    chosen = {mode for (a, b, _), count in zip(best.choices, best.mix.counts, strict=True) if count for mode in (a, b)}
    return [mode for mode in MODES if mode in chosen or mode == Mode("async", "shard")]


def _price_all(problem: Problem, candidate: Candidate, modes: Sequence[Mode], pool: Executor) -> Candidate:
    """The candidate with the prices of these modes (those that its structure has), alone and recomputed, and solved."""
    structure = candidate.structure
    chosen = [mode for mode in structure.modes if mode in modes] or list(structure.modes)
    tasks = [(mode, "none") for mode in chosen]
    tasks += [(mode, "block") for mode in chosen if mode.save_x == "shard" or structure.tensor == 1]
    known = {(each.price.mode, each.price.recompute): each for each in candidate.prices}
    new = [(problem, structure, *task) for task in tasks if task not in known]
    prices = (*candidate.prices, *(each for each in pool.map(_priced, new) if each is not None))
    if not prices:
        return candidate
    frame, period = prices[0].frame, prices[0].period
    units = problem.config.num_hidden_layers // period
    named = list(_ways([_around(each, frame, units) for each in prices], structure))
    ways = tuple(way for way, _ in named)
    choices = tuple(choice for _, choice in named)
    mix, lean = fastest(frame, ways, units, problem.memory), leanest(frame, ways, units)
    return Candidate(structure, candidate.limits, prices, frame, ways, choices, units, period, mix, lean)


def _around(priced: Priced, frame: Frame, units: int) -> Price:
    """The price with its share of what the model's own frame takes longer than ``frame``.

    So a plan whose blocks are all alike takes what its own rehearsal takes, whichever mode the frame is from.
    """
    share = (priced.frame.seconds - frame.seconds) / units / len(priced.price.earlier)
    return replace(priced.price, earlier=tuple(seconds + share for seconds in priced.price.earlier))


def _ways(prices: Sequence[Price], structure: Structure) -> Iterator[tuple[Way, Choice]]:
    """Recomputed blocks first (they need most room in backward, and then find the others' gone), then all mixtures."""
    alone = [each for each in prices if each.recompute == "none"]
    for one in (each for each in prices if each.recompute != "none"):
        yield one.way(_named(one, one, structure)), (one.mode, one.mode, one.recompute)
    for one, other in itertools.product(alone, alone):
        both: Price | None = one if one is other else one.with_mlp_of(other)
        if both is not None:
            yield both.way(_named(one, other, structure)), (one.mode, other.mode, "none")


def _named(attention: Price, mlp: Price, structure: Structure) -> str:
    """What a block does, in words."""
    recomputed = "recomputed" if attention.recompute != "none" else "not recomputed"
    if structure.tensor == 1:
        return recomputed
    if attention.mode == mlp.mode:
        return f"{recomputed}, {attention.mode.name}"
    return f"{recomputed}, attention {attention.mode.name}, MLP {mlp.mode.name}"


def _priced(task: tuple[Problem, Structure, Mode, str]) -> Priced | None:
    """One rehearsal, in a process of the pool; None where the runtime refuses the layout."""
    problem, structure, mode, recompute = task
    plan = problem.plan(structure, [(mode, mode, recompute)] * problem.config.num_hidden_layers)
    try:
        return price(problem.family, problem.config, plan, problem.machine(structure), mode, recompute)
    except InputError:
        return None


def _floor(task: tuple[Problem, Structure]) -> float | None:
    """A structure's floor, in a process of the pool; None where the runtime refuses the layout."""
    problem, structure = task
    plan = problem.plan(structure, [(MODES[0], MODES[0], "none")] * problem.config.num_hidden_layers)
    try:
        return floor(problem.family, problem.config, plan, problem.machine(structure))
    except InputError:
        return None


def _pool(workers: int | None) -> ProcessPoolExecutor:
    """Processes that inherit what is loaded; each rehearsal has a process group of its own."""
    count = workers or len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _settle_in)


def _settle_in() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    gc.collect()
    gc.freeze()  # what was inherited is never garbage: each rehearsal's collections pass it by


# -- the winner -------------------------------------------------------------------------------------------------------


def _settle(problem: Problem, candidate: Candidate) -> tuple[Mix, Composed, Plan] | None:
    """The fastest mix whose composed peak is within the budget, to the byte; None where none is found.

    Prices of blocks miss a few bytes of what a rank holds where two runs of blocks meet; the leanest mix is tried last.
    """
    budget = problem.memory
    for _ in range(ATTEMPTS):
        mix = candidate.within(budget)
        if mix is None:
            break
        composed, plan = _composed(problem, candidate, mix)
        if composed.peak <= problem.memory:
            return mix, composed, plan
        budget -= composed.peak - problem.memory
    assert candidate.lean is not None
    composed, plan = _composed(problem, candidate, candidate.lean)
    return (candidate.lean, composed, plan) if composed.peak <= problem.memory else None


def _composed(problem: Problem, candidate: Candidate, mix: Mix) -> tuple[Composed, Plan]:
    plan = problem.plan(candidate.structure, candidate.blocks(mix))
    return composed_of(problem.config, plan), plan


def composed_of(config: Any, plan: Plan) -> Composed:
    """The prediction of a plan from rehearsals of a few of its blocks: on the fullest rank, the most of each figure."""
    family = family_of(config)
    short = [shortened(run, max(1, plan.in_flight - 1)) for run in runs(kinds(family, config, plan))]
    found = []
    for ranks in rank_classes(config, plan):
        trace = rehearse_few(family, config, plan, ranks.representative, 2, short)
        units, first = [], 0
        for run in short:
            blocks = range(first + run.radius, first + run.radius + run.period)
            units.append(Unit.of(trace, family.blocks, blocks, run.copies))
            first += run.kept
        pieces = cut(trace, family.blocks, family.attention, family.block_norms[0])
        found.append(compose(pieces, trace.saved, units))
    phases: Mapping[str, None] = dict.fromkeys(phase for each in found for phase in each.phase_peaks)
    return Composed(
        {phase: max(each.phase_peaks.get(phase, 0) for each in found) for phase in phases},
        max(each.saved for each in found),
        max(each.sent for each in found),
    )


def _order(candidate: Candidate) -> float:
    return candidate.seconds


def _leaner(
    problem: Problem, candidates: Sequence[Candidate], looked_at: Sequence[Candidate], pool: Executor, until: float
) -> list[Candidate]:
    """Where nothing fits: those that were priced, and any other that may need less than the leanest of them."""
    found = list(looked_at)
    for candidate in sorted(candidates, key=lambda each: each.limits.memory):
        least = min((each.lean.peak for each in found if each.lean), default=2**63)
        if candidate.limits.memory >= least or time.monotonic() > until:
            break
        if all(each.structure != candidate.structure for each in found):
            found.append(_price_all(problem, candidate, FIRST, pool))
    return found


def _least(problem: Problem, looked_at: Sequence[Candidate]) -> str:
    """The line that says what would fit, to the byte."""
    found = f"memory: found {format_bytes(problem.memory)} ({problem.memory:,} bytes) a device; allowed: "
    known = [(each.lean, each) for each in looked_at if each.lean]
    if not known:
        return f"{found}more, or more devices"
    mix, candidate = min(known, key=lambda pair: pair[0].peak)
    least = max(mix.peak, _composed(problem, candidate, mix)[0].peak)
    return (
        f"{found}{format_bytes(least)} ({least:,} bytes) at least, with {candidate.structure.name}, "
        f"{told(candidate, mix)}, a step of {mix.seconds * 1e3:.4g} ms"
    )


def told(candidate: Candidate, mix: Mix) -> str:
    """``3 blocks async, shard / ring, shard; 5 blocks …``."""
    return "; ".join(
        f"{count * candidate.period} blocks {way.name}"
        for way, count in zip(candidate.ways, mix.counts, strict=True)
        if count
    )
