"""Which structures are priced, in which order, and which are proven not to matter.

for each structure, most promising first:
    leave it out if its limits say that no plan of it fits, or beats the best one found
    price it in one mode, and solve for the fastest mix within the budget
then, in what is left of the time, price those that could still win in all their modes, fastest first
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace

from shardwright._errors import InputError
from shardwright.cost.machine import Machine
from shardwright.planner.candidate import Candidate, priced_in
from shardwright.planner.limits import Split, limits, split_of
from shardwright.planner.price import Floor, floor
from shardwright.planner.problem import Problem
from shardwright.planner.space import MODES, Mode, Structure
from shardwright.site import Site

FIRST = (Mode("async", "shard"),)
"""Modes in which a structure is priced first: one is enough to rank structures, and leaves time for more of them."""

Tell = Callable[[str], None]
"""Takes a line of progress."""


def candidates_of(problem: Problem) -> list[Candidate]:
    """Every structure with its limits, most promising first. Raises InputError where there is none."""
    base = problem.base
    found: list[Candidate] = []
    sizes: dict[str, int] = {}
    machines: dict[tuple[tuple[str, int], ...], Machine] = {}  # each works out how its groups lie over hosts
    by_accumulation: dict[int, list[Site]] = {}
    splits: dict[tuple[tuple[int, int, str], int], Split] = {}
    blocks = problem.config.num_hidden_layers
    for structure in problem.structures():
        sites = by_accumulation.get(structure.accumulation)
        if sites is None:
            sites = by_accumulation[structure.accumulation] = _distinct(problem, structure.accumulation)
            sizes = {site.name: site.n * site.k for site in sites}
            if problem.config.tie_word_embeddings:
                sizes[sites[-1].name] = 0
        machine = machines.setdefault(tuple(structure.mesh.items()), problem.machine(structure))
        stored = base.master_dtype or base.dtype
        key = structure.split, structure.accumulation
        if key not in splits:
            splits[key] = split_of(structure, sites, blocks, machine, base.dtype)
        known = limits(structure, sites, blocks, sizes, splits[key], machine, base.dtype, stored, problem.memory)
        found.append(Candidate(structure, known))
    if not found and problem.level is not None and any(replace(problem, level=None).structures()):
        raise InputError(
            f"level: found {problem.level!r}; allowed: replicate, where no ranks of the {problem.devices} split tokens"
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


def explore(
    problem: Problem, candidates: Sequence[Candidate], pool: Executor, until: float, tell: Tell
) -> tuple[list[Candidate], list[Candidate]]:
    """(candidates that were priced, those that were neither priced nor ruled out)."""
    fitting = [each for each in candidates if each.limits.memory <= problem.memory]
    chosen = fitting or sorted(candidates, key=lambda each: each.limits.memory)[:2]
    tell(f"{len(candidates)} structures, {len(fitting)} of them within the budget by their parameters")
    now = time.monotonic()
    chosen = _with_floors(problem, chosen, pool, now + 0.5 * (until - now), tell)
    looked_at: list[Candidate] = []
    left: list[Candidate] = []
    best, last = float("inf"), now + 0.6 * (until - now)
    for number, candidate in enumerate(chosen):
        if candidate.limits.seconds >= best:
            continue  # proven: no plan of it beats the best one
        if looked_at and time.monotonic() > last:
            left.append(candidate)
            continue
        tell(f"structure {number + 1} of {len(chosen)}: {candidate.structure.name}")
        priced = priced_in(problem, candidate, FIRST, pool)
        if priced.frame is not None:
            looked_at.append(priced)
            best = min(best, priced.seconds)
    looked_at.sort(key=lambda each: each.seconds)
    for number, candidate in enumerate(looked_at):  # in modes that were left out they may be faster
        if not candidate.complete and candidate.limits.seconds < best and time.monotonic() <= until:
            tell(f"{candidate.structure.name}: all modes")
            looked_at[number] = candidate = priced_in(problem, candidate, MODES, pool)
            best = min(best, candidate.seconds)
    return looked_at, [each for each in left if each.limits.seconds < best]


def _with_floors(
    problem: Problem, candidates: Sequence[Candidate], pool: Executor, until: float, tell: Tell
) -> list[Candidate]:
    """Candidates with what their operators take and save at least, most promising first, without those refused.

    The level and the axes that split storage change no operator but the optimizer's; more micro-batches cut the same
    work into smaller operators, which take no less. So one micro-batch in blocking mode, parameters whole, shows a
    bound for all structures that split features alike.
    """
    if time.monotonic() >= until:
        return list(candidates)
    kinds = {each.structure.split: each.structure for each in reversed(candidates)}
    guesses = {kind: min(_promise(each) for each in candidates if each.structure.split == kind) for kind in kinds}
    tasks = {
        kind: pool.submit(_floor, (problem, kinds[kind])) for kind in sorted(kinds, key=lambda kind: guesses[kind])
    }
    floors: dict[tuple[int, int, str], Floor | None] = {}
    for kind, task in tasks.items():
        if time.monotonic() < until or task.done():
            tell(f"floor {len(floors) + 1} of {len(tasks)}")
            floors[kind] = task.result()
        else:
            task.cancel()
    blocks = problem.config.num_hidden_layers
    found = []
    for each in candidates:
        kind = each.structure.split
        if kind not in floors:
            found.append(each)
        elif (floor := floors[kind]) is not None:
            above = each.limits.above(floor, blocks // floor.period, each.structure.accumulation, problem.memory)
            found.append(replace(each, limits=above))
    return _by_kind(sorted(found, key=_promise))


def _by_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of each kind in their order, then the others: the guess is surer within a kind than between kinds."""
    firsts: dict[tuple[int, int, str], Structure] = {}
    for each in candidates:
        firsts.setdefault(each.structure.split, each.structure)
    return sorted(candidates, key=lambda each: firsts[each.structure.split] != each.structure)  # a stable sort


def _promise(candidate: Candidate) -> tuple[float, int]:
    """A likely time, and how little memory."""
    return candidate.limits.likely, candidate.limits.memory


def leaner(
    problem: Problem, candidates: Sequence[Candidate], looked_at: Sequence[Candidate], pool: Executor, until: float
) -> tuple[list[Candidate], int]:
    """Where nothing fits yet: those that were priced, now with any that may need less than the leanest, in all modes.

    The one with the lowest limit is priced whatever the time; of others the number is told for which there was none.
    """
    found = {each.structure: each for each in looked_at}
    unseen = 0
    for number, candidate in enumerate(sorted(candidates, key=lambda each: each.limits.memory)):
        known = found.get(candidate.structure, candidate)
        least = min((each.lean.peak for each in found.values() if each.lean), default=2**63)
        if candidate.limits.memory >= least:
            break
        if known.complete:
            continue
        if number and time.monotonic() > until:
            unseen += 1
            continue
        priced = priced_in(problem, known, MODES, pool)
        if priced.frame is not None:
            found[candidate.structure] = priced
    return list(found.values()), unseen


def _floor(task: tuple[Problem, Structure]) -> Floor | None:
    """The floor of all structures that split features like this one, in a process of the pool; None where the runtime
    refuses the layout.
    """
    problem, structure = task
    ranks = structure.replica * structure.data
    probe = replace(structure, replica=1, data=ranks, level="replicate", keep=False, accumulation=1)
    leanest = Mode("blocking", "shard")
    plan = problem.plan(probe, [(leanest, leanest, "none")] * problem.config.num_hidden_layers)
    try:
        return floor(problem.family, problem.config, plan, problem.machine(probe))
    except InputError:
        return None


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
