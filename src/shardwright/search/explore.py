"""Which structures are priced, in which order, and which are proven not to matter.

for each structure, most promising first:
    leave it out if its limits say that no plan of it fits, or beats the best one found
    price it in one mode, and solve for the fastest assignment within the memory limit
then, in what is left of the time, price those that could still win in all their modes, fastest first
at last, look beside the best one: more chunks, other units in flight, another order of the axes, other grids
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from itertools import combinations

from shardwright.errors import InputError
from shardwright.pricing.formula_bounds import FormulaBound, Split, formula_bound, split_like, split_of
from shardwright.pricing.rehearsed_bounds import joined, rehearsed_bounds_of
from shardwright.search.candidate import Candidate, priced_in
from shardwright.simulate.machine import Machine
from shardwright.space.problem import Problem
from shardwright.space.space import CHUNKED, MODES, Mode
from shardwright.spec.site import Site

FIRST = (Mode("async", "shard"),)
"""Modes in which a structure is priced first: one is enough to rank structures, and leaves time for more of them."""

Tell = Callable[[str], None]
"""Takes a line of progress."""


def candidates_of(problem: Problem) -> list[Candidate]:
    """Every structure with its lower bounds, most promising first. Raises InputError where there is none."""
    base = problem.base
    stored = base.master_dtype or base.dtype
    blocks = problem.config.num_hidden_layers
    found: list[Candidate] = []
    by_accumulation: dict[int, tuple[list[Site], dict[str, int]]] = {}
    machines: dict[tuple[tuple[str, int], ...], tuple[Machine, Hashable]] = {}
    splits: dict[Hashable, Split] = {}
    same: dict[Hashable, tuple[list[str], FormulaBound]] = {}  # the order of the axes that was met first
    for structure in problem.structures():
        mesh = tuple(structure.mesh.items())
        if mesh not in machines:
            machine = problem.machine(structure)
            machines[mesh] = machine, _spreads(machine)
        machine, lies = machines[mesh]
        order, alike = list(structure.mesh), (structure.usual, structure.grids, lies)
        if alike in same and same[alike][0] != order:
            continue  # proven: another order of the axes, on which every group lies over the hosts as it does here
        if alike not in same:
            accumulation = structure.accumulation
            if accumulation not in by_accumulation:
                sites = _distinct(problem, accumulation)
                sizes = {site.name: site.n * site.k for site in sites}
                if problem.config.tie_word_embeddings:
                    sizes[sites[-1].name] = 0
                by_accumulation[accumulation] = sites, sizes
            sites, sizes = by_accumulation[accumulation]
            key = structure.split, structure.feature_axes, accumulation
            if key not in splits:
                about = structure, problem.family, sites, blocks, machine
                usual = splits.get((structure.usual.split, structure.usual.feature_axes, accumulation))
                splits[key] = split_like(usual, *about) if usual else split_of(*about, base.dtype)
            known = formula_bound(
                structure, sites, blocks, sizes, splits[key], machine, base.dtype, stored, problem.memory
            )
            same[alike] = order, known
        found.append(Candidate(structure, same[alike][1]))
    if not found and problem.level is not None and any(replace(problem, level=None).structures()):
        raise InputError(
            f"level: found {problem.level!r}; allowed: replicate, where no ranks of the {problem.devices} split tokens"
        )
    if not found:
        raise InputError(
            f"global_batch: found {problem.global_batch} sequences on {problem.devices} devices; allowed: a multiple "
            "of the devices that are left when features are split as the heads allow"
        )
    return sorted(found, key=_promise)


def _spreads(machine: Machine) -> Hashable:
    """How the groups over each set of axes lie over the hosts, whatever the order of the axes."""
    axes = sorted(machine.mesh)
    sets = (each for size in range(1, len(axes) + 1) for each in combinations(axes, size))
    return tuple(machine.spread(tuple(axis for axis in machine.mesh if axis in each)) for each in sets)


def _distinct(problem: Problem, accumulation: int) -> list[Site]:
    """The embedding, the sites of the first block, the head."""
    sites = problem.sites(accumulation)
    first = [site for site in sites if site.name.startswith(f"{problem.family.blocks}.0.")]
    return [sites[0], *first, sites[-1]]


def explore(
    problem: Problem, candidates: Sequence[Candidate], pool: Executor, until: float, tell: Tell
) -> tuple[list[Candidate], list[Candidate]]:
    """(candidates that were priced, those that were neither priced nor ruled out)."""
    fitting = [each for each in candidates if each.formula_bound.memory <= problem.memory]
    chosen = fitting or sorted(candidates, key=lambda each: (not each.structure.plain, each.formula_bound.memory))[:2]
    tell(f"{len(candidates)} structures, {len(fitting)} of them within the memory limit by their parameters")
    now = time.monotonic()
    chosen = _with_rehearsed_bounds(problem, chosen, pool, now + 0.5 * (until - now), tell)
    looked_at: list[Candidate] = []
    left: list[Candidate] = []
    best, last = float("inf"), now + 0.6 * (until - now)
    for number, candidate in enumerate(chosen):
        if candidate.formula_bound.seconds >= best:
            continue  # proven: no plan of it beats the best one
        if looked_at and time.monotonic() > last:
            left.append(candidate)
            continue
        tell(f"structure {number + 1} of {len(chosen)}: {candidate.structure.name}")
        priced = priced_in(problem, candidate, FIRST, pool)
        if priced.fixed_cost is not None:
            looked_at.append(priced)
            best = min(best, priced.seconds)
    looked_at.sort(key=lambda each: each.seconds)
    for modes in (MODES, MODES + CHUNKED):  # in modes that were left out they may be faster
        for number, candidate in enumerate(looked_at):
            if not candidate.has(modes) and candidate.formula_bound.seconds < best and time.monotonic() <= until:
                tell(f"{candidate.structure.name}: {len(modes)} modes")
                looked_at[number] = candidate = priced_in(problem, candidate, modes, pool)
                best = min(best, candidate.seconds)
    return looked_at, [each for each in left if each.formula_bound.seconds < best]


def _with_rehearsed_bounds(
    problem: Problem, candidates: Sequence[Candidate], pool: Executor, until: float, tell: Tell
) -> list[Candidate]:
    """Candidates with what their operators take and save at least, plain ones first, most promising first.

    Those that the runtime refuses are left out.
    """
    promising = [each.structure for each in sorted(candidates, key=_promise)]
    rehearsed_bounds = rehearsed_bounds_of(problem, promising, pool, until, tell) if time.monotonic() < until else {}
    found = []
    for each in candidates:
        kind = each.structure.split
        rehearsed_bound = rehearsed_bounds.get(kind) if kind in rehearsed_bounds else joined(kind, rehearsed_bounds)
        if rehearsed_bound is not None:
            above = each.formula_bound.above(rehearsed_bound, each.structure.accumulation, problem.memory)
            found.append(replace(each, formula_bound=above))
        elif kind not in rehearsed_bounds:
            found.append(each)
    return sorted(found, key=lambda each: (not each.structure.plain, _promise(each)))


def _promise(candidate: Candidate) -> tuple[float, int]:
    """A likely time, and how little memory."""
    return candidate.formula_bound.likely, candidate.formula_bound.memory


def leaner(
    problem: Problem, candidates: Sequence[Candidate], looked_at: Sequence[Candidate], pool: Executor, until: float
) -> tuple[list[Candidate], int]:
    """Where nothing fits yet: those that were priced, now with any that may need less than the leanest, in all modes.

    The one with the lowest limit is priced whatever the time; of others the number is told for which there was none.
    More units in flight never need less, nor do more chunks than are needed.
    """
    found = {each.structure: each for each in looked_at}
    unseen = 0
    least_in_flight = [
        each for each in candidates if each.structure.in_flight == 1 or each.structure.level != "parameters"
    ]
    for number, candidate in enumerate(sorted(least_in_flight, key=lambda each: each.formula_bound.memory)):
        known = found.get(candidate.structure, candidate)
        least = min((each.lean.peak for each in found.values() if each.lean), default=2**63)
        if candidate.formula_bound.memory >= least:
            break
        if known.has(MODES):
            continue
        if number and time.monotonic() > until:
            unseen += 1
            continue
        priced = priced_in(problem, known, MODES, pool)
        if priced.fixed_cost is not None:
            found[candidate.structure] = priced
    return list(found.values()), unseen


def rehearsing(workers: int | None) -> ProcessPoolExecutor:
    """Processes that inherit what is loaded; each rehearsal has a process group of its own."""
    count = workers or len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _settle_in)


def _settle_in() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    gc.collect()
    gc.freeze()  # what was inherited is never garbage: each rehearsal's collections pass it by
