"""What no plan of a structure can do without, by a short rehearsal: seconds of operators, bytes that a block saves.

One step of two units of blocks is rehearsed in blocking mode, with a small vocabulary. No level, no mode, no number of
micro-batches needs fewer or smaller operators, so one rehearsal bounds every structure that splits features alike.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import InputError
from shardwright.families.family import Family
from shardwright.formulas.place import Here
from shardwright.pricing.cut import cut
from shardwright.simulate.machine import Machine
from shardwright.space.problem import Problem
from shardwright.space.space import GRIDS, Mode, Structure
from shardwright.spec.mesh import size_along
from shardwright.spec.plan import Plan
from shardwright.spec.site import Site
from shardwright.stretching.runs import Run, kinds, rehearse_few, runs
from shardwright.trace import Op

Kind = tuple[int, int, str, tuple[str, str]]
"""``Structure.split``."""


@dataclass(frozen=True)
class PartBound:
    """Of a unit's attention, or MLP, in all micro-batches together: seconds of its operators, seconds that recomputing
    it adds, and bytes that it saves for its backward.
    """

    seconds: float
    again: float
    saved: int


@dataclass(frozen=True)
class RehearsedBound:
    """What every plan needs whose structure splits features alike, whatever its level, its modes, its micro-batches.

    frame: seconds of a step's operators outside of the blocks, the optimizer's excepted. No communication, no waiting,
    nothing recomputed. units: of blocks, each of the two ``parts`` (attention, MLP).
    """

    fixed_cost: float
    units: int
    parts: tuple[PartBound, PartBound]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.fixed_cost + self.units * sum(part.seconds for part in self.parts)

    @property
    def again(self) -> float:
        """Seconds that recomputing a unit adds."""
        return sum(part.again for part in self.parts)

    @property
    def saved(self) -> int:
        """Bytes that a unit saves which is not recomputed."""
        return sum(part.saved for part in self.parts)

    def with_mlp_of(self, other: RehearsedBound) -> RehearsedBound:
        """The bound where attention is split as here, and the MLP as there: what lies between them is left out."""
        return RehearsedBound(min(self.fixed_cost, other.fixed_cost), self.units, (self.parts[0], other.parts[1]))


SMALL_VOCABULARY = 64
"""Classes a rank of those that split the vocabulary, where the loss is not what is asked about."""


def rehearsed_bound(family: Family, config: Any, plan: Plan, machine: Machine) -> RehearsedBound:
    """The bound of a plan's structure. All blocks of the plan are alike, with one micro-batch and nothing recomputed.

    One step of two units of like blocks is rehearsed. The first one is recomputed: what it takes more than the second
    is what recomputing adds. The second one counts for all. The vocabulary is a small one, and the head's products are
    priced by their formula.
    """
    run = runs(kinds(family, config, plan))[0]
    kept = min(2 * run.period, run.length)
    first, second = range(kept - run.period), range(kept - run.period, kept)
    head = family.sites(config, plan.micro_batch * plan.sequence)[-1]
    ranks = size_along(plan.mesh, plan.layout_for(head).n + plan.layout_for(head).k)
    small = copy.deepcopy(config)
    small.vocab_size, small.pad_token_id = min(config.vocab_size, SMALL_VOCABULARY * ranks), None
    probe = plan.evolve(recompute={f"{family.blocks}.{block}": "block" for block in first})
    trace = rehearse_few(family, small, probe, 0, 1, [Run(0, kept, run.period, kept)])
    of_head = {linear.name for linear in head.linears}
    seconds: dict[tuple[range | None, str], float] = defaultdict(float)
    saved: dict[str, int] = defaultdict(int)
    for piece in cut(trace, family.blocks, family.attention, family.block_norms[0]):
        if piece.phase == "step":
            continue
        unit = None if piece.block is None else second if piece.block in second else first
        seconds[unit, piece.part] += sum(
            machine.operator(event.name, event.shapes)
            for event in trace.events[piece.first : piece.last]
            if isinstance(event, Op) and event.module not in of_head
        )
        if unit is second and piece.phase == "forward":
            saved[piece.part] += piece.saved

    def of(part: str) -> PartBound:
        once = seconds[second, part]
        return PartBound(once, seconds[first, part] - once if first else 0.0, saved[part])

    fixed_cost = seconds[None, ""] + _head(head, plan, machine)
    return RehearsedBound(fixed_cost, run.length // run.period, (of("attention"), of("mlp")))


def _head(head: Site, plan: Plan, machine: Machine) -> float:
    """Seconds of the head's three products on one rank."""
    layout, here = plan.layout_for(head), Here(plan.mesh, dict.fromkeys(plan.mesh, 0))
    n, k = sum(here.cut(linear.n, layout.n) for linear in head.linears), here.cut(head.k, layout.k)
    return 3 * machine.product(here.cut(head.m, layout.m), n, k)


def rehearsed_bounds_of(
    problem: Problem, structures: Iterable[Structure], pool: Executor, until: float, tell: Callable[[str], None]
) -> dict[Kind, RehearsedBound | None]:
    """How plain structures split features → their bound, the first ones first; None where the runtime refuses it."""
    probes: dict[Kind, Structure] = {}
    for structure in structures:
        if structure.plain:
            probes.setdefault(structure.split, structure)
    tasks = {kind: pool.submit(_rehearsed_bound, (problem, probe)) for kind, probe in probes.items()}
    rehearsed_bounds: dict[Kind, RehearsedBound | None] = {}
    for kind, task in tasks.items():
        if time.monotonic() < until or task.done():
            tell(f"rehearsed bound {len(rehearsed_bounds) + 1} of {len(tasks)}")
            rehearsed_bounds[kind] = task.result()
        else:
            task.cancel()
    return rehearsed_bounds


def joined(kind: Kind, rehearsed_bounds: Mapping[Kind, RehearsedBound | None]) -> RehearsedBound | None:
    """The bound where attention and the MLP have different grids, from those where they have the same."""
    j, l, stream, grids = kind  # noqa: E741
    of = {
        "grid": rehearsed_bounds.get((j, l, stream, GRIDS[0])),
        "flat": rehearsed_bounds.get((j * l, 1, stream, GRIDS[0])),
    }
    attention, mlp = (of[grid] for grid in grids)
    return attention.with_mlp_of(mlp) if attention is not None and mlp is not None else None


def _rehearsed_bound(task: tuple[Problem, Structure]) -> RehearsedBound | None:
    """The bound of all structures that split features like this one, in a process of the pool; None where the runtime
    refuses the layout.
    """
    problem, structure = task
    ranks = structure.replica * structure.data
    probe = replace(structure, replica=1, data=ranks, level="replicate", keep=False, accumulation=1)
    leanest = Mode("blocking", "shard")
    plan = problem.plan(probe, [(leanest, leanest, "none")] * problem.config.num_hidden_layers)
    try:
        return rehearsed_bound(problem.family, problem.config, plan, problem.machine(probe))
    except InputError:
        return None
