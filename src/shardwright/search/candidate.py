"""A structure in the search: its lower bounds, its prices, and the assignments that they make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from shardwright.errors import InputError
from shardwright.pricing.formula_bounds import FormulaBound
from shardwright.pricing.price import Price, Priced, price
from shardwright.solving.solve import Assignment, BlockOption, FixedCost, Program, fastest
from shardwright.space.problem import Choice, Problem
from shardwright.space.space import Mode, Structure


@dataclass(frozen=True)
class Candidate:
    """A structure, its bounds by formulas, and, once it was looked at: prices, fixed cost, options, their choices.

    assignment: the fastest within the memory limit, or None. lean: the one that needs least memory. tried: modes that
    were priced (or refused).
    """

    structure: Structure
    formula_bound: FormulaBound
    prices: tuple[Priced, ...] = ()
    fixed_cost: FixedCost | None = None
    options: tuple[BlockOption, ...] = ()
    choices: tuple[Choice, ...] = ()
    units: int = 0
    period: int = 1
    assignment: Assignment | None = None
    lean: Assignment | None = None
    tried: tuple[Mode, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the fastest assignment that fits; infinite where none does."""
        return self.assignment.seconds if self.assignment else float("inf")

    def has(self, modes: Sequence[Mode]) -> bool:
        """Whether those of these modes that the structure has were tried."""
        return all(mode in self.tried for mode in _of(self.structure, modes))

    @property
    def bound(self) -> float:
        """Seconds that no plan of the structure within the memory limit beats, by its prices, or where some are not
        known by its formulas.
        """
        return (
            self.formula_bound.seconds
            if not self.has(self.structure.modes)
            else self.assignment.bound
            if self.assignment
            else float("inf")
        )

    def blocks(self, assignment: Assignment) -> list[Choice]:
        """What each block of the model chooses."""
        return [
            choice
            for choice, count in zip(self.choices, assignment.counts, strict=True)
            for _ in range(count * self.period)
        ]

    def within(self, memory: int) -> Assignment | None:
        """The fastest assignment of this structure within ``memory`` bytes."""
        if self.fixed_cost is None:
            return None
        return fastest(self.fixed_cost, self.options, self.units, memory)


def told(candidate: Candidate, assignment: Assignment) -> str:
    """``3 blocks async, shard / ring, shard; 5 blocks …``."""
    return "; ".join(
        f"{count * candidate.period} block{'s' if count * candidate.period > 1 else ''} {option.name}"
        for option, count in zip(candidate.options, assignment.counts, strict=True)
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
    """The candidate with these prices too, and the assignments that they make."""
    structure, prices = candidate.structure, (*candidate.prices, *(each for each in new if each is not None))
    tried = tuple(dict.fromkeys((*candidate.tried, *modes)))
    if not prices:
        return replace(candidate, tried=tried)
    fixed_cost, period = prices[0].fixed_cost, prices[0].period
    units, rest = divmod(problem.config.num_hidden_layers, period)
    if rest:
        raise InputError(
            f"num_hidden_layers: found {problem.config.num_hidden_layers}; allowed: a multiple of {period}, the period "
            "of unlike blocks (layer_types)"
        )
    named = list(_options([_around(each, fixed_cost, units) for each in prices], structure))
    options = tuple(option for option, _ in named)
    choices = tuple(choice for _, choice in named)
    program = Program(fixed_cost, options, units)
    assignment, lean = program.fastest(problem.memory), program.leanest()
    return Candidate(
        structure, candidate.formula_bound, prices, fixed_cost, options, choices, units, period, assignment, lean, tried
    )


def _of(structure: Structure, modes: Sequence[Mode]) -> list[Mode]:
    """Those of the modes that the structure has; where it has none of them, all that it has."""
    return [mode for mode in structure.modes if mode in modes] or list(structure.modes)


def _around(priced: Priced, fixed_cost: FixedCost, units: int) -> Price:
    """The price with its share of what the model's own frame takes longer than ``frame``.

    So a plan whose blocks are all alike takes what its own rehearsal takes, whichever mode the frame is from.
    """
    share = (priced.fixed_cost.seconds - fixed_cost.seconds) / units / len(priced.price.earlier)
    return replace(priced.price, earlier=tuple(seconds + share for seconds in priced.price.earlier))


def _options(prices: Sequence[Price], structure: Structure) -> Iterator[tuple[BlockOption, Choice]]:
    """Recomputed blocks first (they need most room in backward, and then find the others' gone), then all mixed
    assignments.
    """
    alone = [each for each in prices if each.recompute == "none"]
    for one in (each for each in prices if each.recompute != "none"):
        yield one.option(_named(one, one, structure)), (one.mode, one.mode, one.recompute)
    for one, other in itertools.product(alone, alone):
        both: Price | None = one if one is other else one.with_mlp_of(other)
        if both is not None:
            yield both.option(_named(one, other, structure)), (one.mode, other.mode, "none")


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
