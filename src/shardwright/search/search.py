"""The search from end to end: explore, take the fastest, compose it to the byte, certify it, and say how sure it is.

the bound is the least of: what the structures tried can reach, and the lower bounds of those not priced (in all modes)
where the composed peak is over the memory limit after all, take the overshoot off and solve again
certify: rehearse the plan itself
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from shardwright.certificate.certify import Certificate, Expected, certifying
from shardwright.errors import DoesNotFit
from shardwright.files.sizes import format_bytes
from shardwright.pricing.compose import Composed, Known, composed_of, composing
from shardwright.search.candidate import Candidate, priced_in, told
from shardwright.search.explore import Tell, candidates_of, explore, leaner, rehearsing
from shardwright.search.neighbours import improved
from shardwright.solving.solve import Assignment
from shardwright.space.problem import Problem
from shardwright.space.request import SECONDS
from shardwright.space.space import MODES
from shardwright.spec.plan import Plan

_log = logging.getLogger(__name__)

WIDELY = 0.8
"""Share of the time for all structures; the rest is for what lies beside the best one."""

ATTEMPTS = 6
"""How often an assignment that is over the memory limit to the byte is solved again."""


@dataclass(frozen=True)
class Found:
    """The answer: a certified plan, the candidate that it comes from, and all others.

    composed: what was predicted before the rehearsal. looked_at: candidates that were priced, best first. left:
    promising least first, those that were not. bound: seconds that no plan of the space can beat, by the model.
    """

    problem: Problem
    plan: Plan
    candidate: Candidate
    assignment: Assignment
    composed: Composed
    certificate: Certificate
    looked_at: tuple[Candidate, ...]
    left: tuple[Candidate, ...]
    bound: float


def search(problem: Problem, seconds: float = SECONDS, workers: int | None = None, tell: Tell = _log.info) -> Found:
    """The fastest certified plan that fits.

    seconds: how long structures may be priced; composing and certifying come on top. workers: processes that rehearse
    (default: the machine's processors). tell: takes lines of progress, by default the logger.
    Raises DoesNotFit where nothing fits, naming the least memory that works and what it gives up.
    """
    started = time.monotonic()
    with warnings.catch_warnings(), rehearsing(workers) as pool:
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        looked_at, left = _priced(problem, pool, started, seconds, tell)
        failed: list[Candidate] = []
        settled = _first_that_settles(problem, looked_at, failed, pool, tell)
        if settled is None:
            raise DoesNotFit(_least(problem, looked_at, len(left), pool))
        best, (assignment, composed, plan, certified) = settled
        tell(f"{best.structure.name}: certifying")
        certificate = certified(composed.expected())
    bound = min(
        [assignment.seconds, *(each.bound for each in looked_at), *(each.formula_bound.seconds for each in left)]
    )
    predicted = certificate.predicted()
    predicted["time"] = certificate.seconds
    plan = certificate.written(plan).evolve(
        predicted=predicted,
        objective=assignment.seconds,
        bound=bound,
        gap=(assignment.seconds - bound) / assignment.seconds,
        solve_time=time.monotonic() - started,
    )
    others = [each for each in looked_at if each not in failed and each is not best]
    told_of = (best, *others, *(replace(each, assignment=None) for each in failed))
    return Found(problem, plan, best, assignment, composed, certificate, told_of, tuple(left), bound)


def _priced(
    problem: Problem, pool: Executor, started: float, seconds: float, tell: Tell
) -> tuple[list[Candidate], list[Candidate]]:
    """(candidates that were priced, fastest first, the fastest in more modes than others; those that were not)."""
    candidates, until = candidates_of(problem), started + seconds
    looked_at, left = explore(problem, candidates, pool, started + WIDELY * seconds, tell)
    if not any(candidate.assignment for candidate in looked_at):
        looked_at, unseen = leaner(problem, candidates, looked_at, pool, until)
        seen = {each.structure for each in looked_at}
        left = [each for each in left if each.structure not in seen]
        if not any(candidate.assignment for candidate in looked_at):
            raise DoesNotFit(_least(problem, looked_at, unseen, pool))
    best = min((candidate for candidate in looked_at if candidate.assignment), key=lambda each: each.seconds)
    others = [each for each in looked_at if each is not best]
    tell(f"{best.structure.name}: all modes")
    beside = improved(problem, priced_in(problem, best, MODES, pool), left, pool, until, tell)
    seen = {each.structure for each in beside}
    looked_at = sorted([*beside, *others], key=lambda each: each.seconds)
    return looked_at, [each for each in left if each.structure not in seen]


Settled = tuple[Assignment, Composed, Plan, Callable[[Expected], Certificate]]
"""An assignment whose plan is within the memory limit to the byte, and its certificate, which is being made."""


def _first_that_settles(
    problem: Problem, looked_at: Sequence[Candidate], failed: list[Candidate], pool: Executor, tell: Tell
) -> tuple[Candidate, Settled] | None:
    """The fastest candidate whose plan fits, to the byte; ``failed`` takes those that were faster."""
    for candidate in looked_at:
        if candidate.assignment is None:
            break
        tell(f"{candidate.structure.name}: composing")
        settled = _settle(problem, candidate, pool)
        if settled is not None:
            return candidate, settled
        failed.append(candidate)
    return None


def _settle(problem: Problem, candidate: Candidate, pool: Executor) -> Settled | None:
    """The fastest assignment whose composed peak is within the memory limit, to the byte; None where none is found.

    Prices of blocks miss a few bytes of what a rank holds where two runs of blocks meet; the leanest assignment is
    tried last. Most assignments settle at once, so the first one's certificate is begun while it is composed; neither
    knows the other.
    """
    memory, known = problem.memory, Known()
    for attempt in range(ATTEMPTS + 1):
        assignment = (candidate.within(memory) if attempt < ATTEMPTS else None) or candidate.lean
        assert assignment is not None
        plan = problem.plan(candidate.structure, candidate.blocks(assignment))
        machine = problem.machine(candidate.structure)
        composed_of_all = composing(problem.config, plan, pool, known)
        certified = certifying(problem.config, plan, pool, machine) if attempt == 0 else None
        composed = composed_of_all()
        if composed.peak <= problem.memory:
            return assignment, composed, plan, certified or certifying(problem.config, plan, pool, machine)
        if assignment is candidate.lean:
            break
        memory -= composed.peak - problem.memory
    return None


def _least(problem: Problem, looked_at: Sequence[Candidate], unseen: int, pool: Executor) -> str:
    """The line that says what would fit, to the byte; unseen: structures that may need less, for want of time."""
    found = f"memory: found {format_bytes(problem.memory)} ({problem.memory:,} bytes) a device; allowed: "
    known = [(each.lean, each) for each in looked_at if each.lean]
    if not known:
        return f"{found}more, or more devices"
    assignment, candidate = min(known, key=lambda pair: pair[0].peak)
    plan = problem.plan(candidate.structure, candidate.blocks(assignment))
    least = max(assignment.peak, composed_of(problem.config, plan, pool).peak)
    return (
        f"{found}{format_bytes(least)} ({least:,} bytes) at least, with {candidate.structure.name}, "
        f"{told(candidate, assignment)}, a step of {assignment.seconds * 1e3:.4g} ms"
        + (f" ({unseen} more structures, which may need less, were not looked at: there was no time)" if unseen else "")
    )
