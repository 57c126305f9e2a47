"""A structure on its way through the search: what it promises, its prices, and the mixes that they make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from shardwright._errors import InputError
from shardwright.planner.limits import Limits
from shardwright.planner.price import Price, Priced, price
from shardwright.planner.problem import Choice, Problem
from shardwright.planner.solve import Frame, Mix, Way, fastest, leanest
from shardwright.planner.space import Mode, Structure


@dataclass(frozen=True)
class Candidate:
    """A structure, what its formulas promise, and, once it was looked at: prices, frame, ways and their choices.

    mix: the fastest within the budget, or None. lean: the one that needs least memory. complete: every mode was priced.
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
    complete: bool = False

    @property
    def seconds(self) -> float:
        """Of the fastest mix that fits; infinite where none does."""
        return self.mix.seconds if self.mix else float("inf")

    @property
    def bound(self) -> float:
        """Seconds that no plan of the structure within the budget beats, by its prices, or where some are not known by
        its limits.
        """
        return self.limits.seconds if not self.complete else self.mix.bound if self.mix else float("inf")

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


def told(candidate: Candidate, mix: Mix) -> str:
    """``3 blocks async, shard / ring, shard; 5 blocks …``."""
    return "; ".join(
        f"{count * candidate.period} blocks {way.name}"
        for way, count in zip(candidate.ways, mix.counts, strict=True)
        if count
    )


def priced_in(problem: Problem, candidate: Candidate, modes: Sequence[Mode], pool: Executor) -> Candidate:
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
    units, rest = divmod(problem.config.num_hidden_layers, period)
    if rest:
        raise InputError(
            f"num_hidden_layers: found {problem.config.num_hidden_layers}; allowed: a multiple of {period}, the period "
            "of unlike blocks (layer_types)"
        )
    named = list(_ways([_around(each, frame, units) for each in prices], structure))
    ways = tuple(way for way, _ in named)
    choices = tuple(choice for _, choice in named)
    mix, lean = fastest(frame, ways, units, problem.memory), leanest(frame, ways, units)
    complete = candidate.complete or set(structure.modes) <= set(modes)
    return Candidate(structure, candidate.limits, prices, frame, ways, choices, units, period, mix, lean, complete)


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
