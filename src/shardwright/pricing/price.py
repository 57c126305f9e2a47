"""What one block costs under a structure and a mode: measured on a short rehearsal, block by block, to the byte.

A short model (a few blocks, all alike) is rehearsed; the trace is cut into pieces, and its middle block is the price of
all: the bytes that stay alive for it, what its passes add and need at most, and the seconds that its pieces take on the
timeline of step 2 (in step 1 the order of gathers is not known yet). Everything else is the frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.families.family import Family
from shardwright.pricing.compose import Unit
from shardwright.pricing.cut import TracePiece, cut
from shardwright.simulate.machine import Machine
from shardwright.simulate.timeline import timeline
from shardwright.solving.solve import BlockOption, FixedCost
from shardwright.space.space import Mode
from shardwright.spec.plan import Plan
from shardwright.stretching.bucket_period import short_runs
from shardwright.stretching.runs import rehearse_few
from shardwright.trace import Trace


@dataclass(frozen=True)
class Passage:
    """One part of a block in one pass: bytes that it adds, the most that it needs beyond what was there, seconds."""

    part: str
    rise: int
    top: int
    seconds: float


@dataclass(frozen=True)
class Price:
    """One block (or unit of unlike ones) under one mode.

    resident: bytes alive through the last micro-batch of a step for it: parameters, moments, weights that stay
    gathered, gradients of earlier micro-batches. forward, backward: its parts in order, in the last micro-batch;
    earlier: seconds of all other micro-batches.
    """

    mode: Mode
    recompute: str
    resident: int
    forward: tuple[Passage, ...]
    backward: tuple[Passage, ...]
    earlier: tuple[float, ...]

    def with_mlp_of(self, other: Price) -> Price | None:
        """This block's attention with the other's MLP; None where their parts do not come in the same order."""
        if self.recompute != "none" or other.recompute != "none":
            return None
        mine, theirs = self.forward + self.backward, other.forward + other.backward
        if [each.part for each in mine] != [each.part for each in theirs]:
            return None

        def joined(one: Sequence[Passage], another: Sequence[Passage]) -> tuple[Passage, ...]:
            return tuple(a if a.part == "attention" else b for a, b in zip(one, another, strict=True))

        earlier = (self.earlier[0], other.earlier[1])
        return replace(
            self,
            forward=joined(self.forward, other.forward),
            backward=joined(self.backward, other.backward),
            earlier=earlier,
        )

    def option(self, name: str) -> BlockOption:
        """The price as the solver reads it."""
        passages = self.forward + self.backward
        return BlockOption(
            name,
            sum(self.earlier) + sum(each.seconds for each in passages),
            self.resident,
            sum(each.rise for each in self.forward),
            _top(self.forward),
            sum(each.rise for each in self.backward),
            _top(self.backward),
        )


def _top(passages: Sequence[Passage]) -> int:
    alive, top = 0, 0
    for each in passages:
        top = max(top, alive + each.top)
        alive += each.rise
    return top


@dataclass(frozen=True)
class Priced:
    """A block's price, and the frame around the blocks that was rehearsed with it."""

    price: Price
    fixed_cost: FixedCost
    period: int


MICRO_BATCHES = 3
"""Micro-batches that are rehearsed for a price: the first, one that adds to its gradients, and the last."""

LOSS_BYTES = 4
"""A micro-batch's loss, float32, is there until its step ends."""


def price(family: Family, config: Any, plan: Plan, machine: Machine, mode: Mode, recompute: str) -> Priced:
    """Prices the blocks of ``plan``, which are all alike (or alternate between the types of the config).

    Raises InputError where the plan does not fit the model.
    """
    short = short_runs(family, config, plan, 0, max(1, plan.in_flight - 1), 1)[0]
    few = plan.evolve(accumulation=min(plan.accumulation, MICRO_BATCHES))
    rehearsed = (1, few.accumulation)
    trace = rehearse_few(family, config, few, 0, rehearsed, [short])
    again = plan.accumulation - few.accumulation
    input_bytes = sum(storage.bytes for storage in trace.storages if storage.category == "input") // sum(rehearsed)
    left_out = (2 * plan.accumulation - sum(rehearsed)) * input_bytes + again * LOSS_BYTES
    middle = short.radius if short.copies else short.kept // 2 // short.period * short.period
    pieces = cut(trace, family.blocks, family.attention, family.block_norms[0])
    unit = Unit.of(trace, family.blocks, range(middle, middle + short.period), 0)
    one, seconds = _price_of(trace, pieces, unit, again, machine, mode, recompute)
    fixed_cost = _fixed_cost(pieces, one.option(""), short.kept // short.period, seconds)
    return Priced(one, replace(fixed_cost, resident=fixed_cost.resident + left_out), short.period)


def _price_of(
    trace: Trace, pieces: Sequence[TracePiece], unit: Unit, again: int, machine: Machine, mode: Mode, recompute: str
) -> tuple[Price, float]:
    """(the price of a unit of blocks, seconds of the whole step).

    again: micro-batches that the trace lacks; each takes as long as the last but one, and adds no bytes to a block.
    """
    clock = timeline(trace, machine, 2)
    offset = next(index for index, event in enumerate(trace.events) if event.step == 2)
    seconds = {
        piece.first: _at(clock.at, clock.seconds, piece.last - offset)
        - _at(clock.at, clock.seconds, piece.first - offset)
        for piece in pieces
        if piece.step == 2
    }
    last = max(piece.micro for piece in pieces if piece.step == 2)
    before = [
        sum(piece.end - piece.start for piece in unit.passing(pieces, 2, phase, micro))
        for micro in range(last)
        for phase in ("forward", "backward")
    ]
    resident = unit.standing + unit.moments + unit.lasting(pieces) + sum(before)
    parts = ("attention", "mlp")
    earlier = tuple(
        sum(
            seconds[piece.first] * (1 + again if piece.micro == last - 1 else 1)
            for piece in pieces
            if piece.step == 2 and piece.micro < last and piece.block in unit.blocks and piece.part == part
        )
        for part in parts
    )
    one = Price(
        mode,
        recompute,
        resident,
        _passages(unit.passing(pieces, 2, "forward", last), seconds),
        _passages(unit.passing(pieces, 2, "backward", last), seconds),
        earlier,
    )
    more = again * sum(seconds[p.first] for p in pieces if p.step == 2 and p.micro == last - 1 and p.phase != "step")
    return one, clock.seconds + more


def _at(at: Sequence[float], end: float, index: int) -> float:
    return at[index] if index < len(at) else end


def _passages(pieces: Sequence[TracePiece], seconds: Mapping[int, float]) -> tuple[Passage, ...]:
    """Pieces as passages; neighbours of one part are one."""
    found: list[Passage] = []
    for piece in pieces:
        here = Passage(piece.part, piece.end - piece.start, piece.most - piece.start, seconds[piece.first])
        if found and found[-1].part == here.part:
            before = found.pop()
            here = Passage(
                here.part,
                before.rise + here.rise,
                max(before.top, before.rise + here.top),
                before.seconds + here.seconds,
            )
        found.append(here)
    return tuple(found)


def _fixed_cost(pieces: Sequence[TracePiece], option: BlockOption, units: int, seconds: float) -> FixedCost:
    """What is not the blocks': levels of the last micro-batch less what ``units`` blocks hold there."""
    last = max(piece.micro for piece in pieces if piece.step == 2)
    micro = [piece for piece in pieces if piece.step == 2 and (piece.micro == last or piece.phase == "step")]
    inside = [index for index, piece in enumerate(micro) if piece.block is not None]
    turn = next(index for index in inside if micro[index].phase == "backward")
    up = max(index for index in inside if micro[index].phase == "forward")
    before, between, after = micro[: inside[0]], micro[up + 1 : turn], micro[inside[-1] + 1 :]
    resident = before[0].start - units * option.resident
    rise = sum(piece.end - piece.start for piece in before)
    held = before[0].start + rise + units * option.forward
    middle = sum(piece.end - piece.start for piece in between)
    end = held + middle + units * option.backward
    return FixedCost(
        seconds - units * option.seconds,
        resident,
        rise,
        max(piece.most for piece in before) - before[0].start,
        middle,
        max(piece.most for piece in between) - held,
        max(piece.most for piece in after) - end,
    )
