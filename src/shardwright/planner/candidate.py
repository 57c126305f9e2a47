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

    mix: the fastest within the budget, or None. lean: the one that needs least memory. tried: modes that were priced
    (or refused).
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
    tried: tuple[Mode, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the fastest mix that fits; infinite where none does."""
        return self.mix.seconds if self.mix else float("inf")

    def has(self, modes: Sequence[Mode]) -> bool:
        """Whether those of these modes that the structure has were tried."""
        return all(mode in self.tried for mode in _of(self.structure, modes))

    @property
    def bound(self) -> float:
        """Seconds that no plan of the structure within the budget beats, by its prices, or where some are not known by
        its limits.
        """
        return (
            self.limits.seconds if not self.has(self.structure.modes) else self.mix.bound if self.mix else float("inf")
        )

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
        f"{count * candidate.period} block{'s' if count * candidate.period > 1 else ''} {way.name}"
        for way, count in zip(candidate.ways, mix.counts, strict=True)
        if count
    )


RECOMPUTE = ("none", "block")

Asked = tuple[Candidate, Sequence[Mode]]
"""A candidate, and the modes in which it is to be priced."""


def priced_in(problem: Problem, candidate: Candidate, modes: Sequence[Mode], pool: Executor) -> Candidate:
    """The candidate with the prices of these modes (those that its structure has), alone and recomputed, and solved."""
    return all_priced(problem, [(candidate, modes)], pool)[0]


def all_priced(
    problem: Problem, asked: Sequence[Asked], pool: Executor, words: Sequence[str] = RECOMPUTE
) -> list[Candidate]:
    """The same for several candidates side by side. words: what may be recomputed of a block."""
    asked = [(candidate, _of(candidate.structure, modes)) for candidate, modes in asked]
    tasks = [_tasks(candidate, modes, words) for candidate, modes in asked]
    pairs = list(zip(asked, tasks, strict=True))
    prices = pool.map(
        _priced, [(problem, candidate.structure, *task) for (candidate, _), mine in pairs for task in mine]
    )
    return [_solved(problem, candidate, modes, [next(prices) for _ in mine]) for (candidate, modes), mine in pairs]


def _tasks(candidate: Candidate, modes: Sequence[Mode], words: Sequence[str]) -> list[tuple[Mode, str]]:
    """(mode, recomputation) that are not priced yet. What is recomputed keeps no gathered input."""
    known = {(each.price.mode, each.price.recompute) for each in candidate.prices}
    structure = candidate.structure
    return [
        (mode, word)
        for word in words
        for mode in modes
        if (mode, word) not in known and (word == "none" or mode.save_x == "shard" or structure.tensor == 1)
    ]


def _solved(problem: Problem, candidate: Candidate, modes: Sequence[Mode], new: Sequence[Priced | None]) -> Candidate:
    """The candidate with these prices too, and the mixes that they make."""
    structure, prices = candidate.structure, (*candidate.prices, *(each for each in new if each is not None))
    tried = tuple(dict.fromkeys((*candidate.tried, *modes)))
    if not prices:
        return replace(candidate, tried=tried)
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
    return Candidate(structure, candidate.limits, prices, frame, ways, choices, units, period, mix, lean, tried)


def _of(structure: Structure, modes: Sequence[Mode]) -> list[Mode]:
    """Those of the modes that the structure has; where it has none of them, all that it has."""
    return [mode for mode in structure.modes if mode in modes] or list(structure.modes)


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
    try:
        plan = problem.plan(structure, [(mode, mode, recompute)] * problem.config.num_hidden_layers)
        return price(problem.family, problem.config, plan, problem.machine(structure), mode, recompute)
    except InputError:
        return None
