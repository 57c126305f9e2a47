"""The fastest mix of equal blocks under a memory budget: an integer program, solved to the optimum.

A model is a frame (embedding, norms, head, loss, optimizer step) around L blocks. Each block takes one of K ways, and
blocks that go the same way stand together, in the order of the ways. x_k blocks go way k:

    least   T₀ + Σ t_k·x_k          with  Σ x_k = L

What is alive at the worst moments must stay within the budget B, where R₀ and r_k are alive all the time, a forward of
a block adds f_k and needs F_k at most, its backward adds b_k (a gradient less what was saved) and needs G_k at most:

| moment                          | alive                                                                        |
|---------------------------------|------------------------------------------------------------------------------|
| before the blocks               | R₀ + Σ r·x + pre                                                             |
| forward, last block of run k    | R₀ + Σ r·x + p + Σ_{j≤k} f_j·x_j − f_k + F_k                                  |
| forward, first block of run k   | R₀ + Σ r·x + p + Σ_{j<k} f_j·x_j + F_k                                        |
| head, loss and their backward   | R₀ + Σ r·x + p + Σ f·x + mid                                                 |
| backward, last block of run k   | R₀ + Σ r·x + p + q + Σ f·x + Σ_{j>k} b_j·x_j + G_k                            |
| backward, first block of run k  | R₀ + Σ r·x + p + q + Σ f·x + Σ_{j≥k} b_j·x_j − b_k + G_k                       |
| after the blocks, and the step  | R₀ + Σ r·x + p + q + Σ (f+b)·x + post                                         |

Every line is linear in x, and one for run k counts only where x_k > 0: a binary y_k says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np


@dataclass(frozen=True)
class BlockOption:
    """One way for a block to go: seconds of a step, and bytes (the module's table).

    resident: r. forward: f, forward_top: F. backward: b, backward_top: G.
    """

    name: str
    seconds: float
    resident: int
    forward: int
    forward_top: int
    backward: int
    backward_top: int


@dataclass(frozen=True)
class FixedCost:
    """All but the blocks: seconds T₀, bytes R₀, what its parts add (p, q) and need at most (pre, mid, post)."""

    seconds: float
    resident: int
    before: int
    before_top: int
    between: int
    between_top: int
    after_top: int


@dataclass(frozen=True)
class Assignment:
    """A solution: how many blocks go each way; seconds; a bound that no mix beats; bytes at the worst moment."""

    counts: tuple[int, ...]
    seconds: float
    bound: float
    peak: int

    @property
    def gap(self) -> float:
        """(seconds − bound) / seconds."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds else 0.0


def seconds_of(fixed_cost: FixedCost, options: Sequence[BlockOption], counts: Sequence[int]) -> float:
    """The objective of a mix."""
    return fixed_cost.seconds + sum(option.seconds * count for option, count in zip(options, counts, strict=True))


def peak_of(fixed_cost: FixedCost, options: Sequence[BlockOption], counts: Sequence[int]) -> int:
    """Bytes alive at the worst moment of a mix, line by line as the module's table has them."""
    resident = fixed_cost.resident + sum(option.resident * count for option, count in zip(options, counts, strict=True))
    moments, alive = [resident + fixed_cost.before_top], resident + fixed_cost.before
    for option, count in zip(options, counts, strict=True):
        if count:
            moments += [alive + option.forward_top, alive + option.forward * (count - 1) + option.forward_top]
            alive += option.forward * count
    moments.append(alive + fixed_cost.between_top)
    alive += fixed_cost.between
    for option, count in reversed(list(zip(options, counts, strict=True))):
        if count:
            moments += [alive + option.backward_top, alive + option.backward * (count - 1) + option.backward_top]
            alive += option.backward * count
    return max(*moments, alive + fixed_cost.after_top)


def fastest(fixed_cost: FixedCost, options: Sequence[BlockOption], blocks: int, budget: int) -> Assignment | None:
    """The fastest mix of ``blocks`` blocks within ``budget`` bytes; None where there is none."""
    program = _Program(fixed_cost, options, blocks)
    program.within(budget)
    return program.solve([option.seconds for option in options], 0.0, fixed_cost.seconds)


def leanest(fixed_cost: FixedCost, options: Sequence[BlockOption], blocks: int) -> Assignment:
    """The mix that needs least memory (its ``peak``)."""
    program = _Program(fixed_cost, options, blocks)
    program.within(None)
    costs = [option.seconds for option in options]
    found = program.solve([0.0] * len(options), 1.0, 0.0)
    assert found is not None  # without a budget every mix is allowed
    while True:  # the solver weighs peaks by its tolerance, a budget is kept to the byte
        program.within(found.peak - 1)
        leaner = program.solve(costs, 0.0, fixed_cost.seconds)
        if leaner is None:
            break
        found = leaner
    seconds = seconds_of(fixed_cost, options, found.counts)
    return Assignment(found.counts, seconds, seconds, found.peak)


class _Program:
    """Columns x_1…x_K (integers), y_1…y_K (0 or 1), and, without a budget, the peak z.

    The solver takes what is within its tolerance for equal. So bytes are counted in units of which the largest sum has
    some thousand, where the tolerance is below a byte and rounding far below it, and costs in units of which the
    dearest way has a thousand; and a mix that is over the budget after all, by a byte, is forbidden by name.

    No start is given, which would save nothing of some milliseconds: from one HiGHS 1.16 ends where it began, now and
    then, if its presolve is on, and with presolve off its cuts at these tolerances have taken the fastest mix away.
    """

    LARGEST_BITS = 10
    TOLERANCE = 1e-9
    DEAREST = 1e3

    def __init__(self, fixed_cost: FixedCost, options: Sequence[BlockOption], blocks: int):
        self.fixed_cost, self.options, self.blocks = fixed_cost, options, blocks
        self._rows: list[tuple[list[float], list[float], float]] = []  # coefficients of x and y, constant
        self._lines()

    def _lines(self) -> None:
        fixed_cost, options, each = self.fixed_cost, self.options, range(len(self.options))
        resident = [float(option.resident) for option in options]
        self._line(resident, fixed_cost.resident + fixed_cost.before_top)
        base = fixed_cost.resident + fixed_cost.before
        for k, option in enumerate(options):
            first = [resident[j] + (options[j].forward if j < k else 0) for j in each]
            self._line(first, base + option.forward_top, k)
            last = [resident[j] + (options[j].forward if j <= k else 0) for j in each]
            self._line(last, base + option.forward_top - option.forward, k)
        held = [resident[j] + options[j].forward for j in each]
        self._line(held, base + fixed_cost.between_top)
        base += fixed_cost.between
        for k, option in enumerate(options):
            last = [held[j] + (options[j].backward if j > k else 0) for j in each]
            self._line(last, base + option.backward_top, k)
            first = [held[j] + (options[j].backward if j >= k else 0) for j in each]
            self._line(first, base + option.backward_top - option.backward, k)
        self._line([held[j] + options[j].backward for j in each], base + fixed_cost.after_top)

    def _line(self, x: list[float], constant: float, k: int | None = None) -> None:
        """Alive = Σ x·coefficients + constant; with k it counts only where x_k > 0."""
        y = [0.0] * len(self.options)
        if k is not None:  # switched off by as much as the line can be at most
            most = max(0.0, max(x)) * self.blocks + abs(constant)
            y[k], constant = most, constant - most
        self._rows.append((x, y, constant))

    def within(self, budget: int | None) -> None:
        """What is alive at every moment is at most the budget; None: at most z."""
        self.budget = budget

    def solve(self, costs: Sequence[float], peak_cost: float, constant: float) -> Assignment | None:
        """Least Σ costs·x + peak_cost·z."""
        dearest = max((abs(cost) for cost in costs), default=0.0)
        scaled = self.DEAREST / dearest if dearest else 1.0
        model = self._model([cost * scaled for cost in costs], peak_cost)
        while True:
            model.run()
            if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return None
            counts = tuple(round(value) for value in model.getSolution().col_value[: len(self.options)])
            peak = peak_of(self.fixed_cost, self.options, counts)
            if self.budget is None or peak <= self.budget:
                break
            self._forbid(model, counts)
        seconds, info = seconds_of(self.fixed_cost, self.options, counts), model.getInfo()
        bound = seconds  # a gap of 0 says that nothing is left to look at; mip_dual_bound may lag behind then
        if info.mip_gap > 0:
            bound = min(seconds, constant + float(info.mip_dual_bound) / scaled)
        return Assignment(counts, seconds, bound, peak)

    def _model(self, costs: Sequence[float], peak_cost: float) -> highspy.Highs:
        count, infinite = len(self.options), highspy.kHighsInf
        model = _silent_solver()
        options = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1, "small_matrix_value": 1e-12}
        kinds = ("mip_feasibility", "primal_feasibility", "dual_feasibility")
        for name, value in (options | {f"{kind}_tolerance": self.TOLERANCE for kind in kinds}).items():
            model.setOptionValue(name, value)
        for cost in costs:
            _column(model, cost, self.blocks)
        for _ in range(count):
            _column(model, 0.0, 1)
        if self.budget is None:
            model.addCol(peak_cost, -infinite, infinite, 0, np.array([], dtype=np.int32), np.array([]))
        _row(model, dict.fromkeys(range(count), 1.0), float(self.blocks), float(self.blocks))
        for k in range(count):
            _row(model, {k: 1.0, count + k: -float(self.blocks)}, -infinite, 0.0)
        room = 0.0 if self.budget is None else float(self.budget)
        unit = self._unit(room)
        for x, y, alive in self._rows:
            entries = {k: value * unit for k, value in enumerate([*x, *y]) if value}
            if self.budget is None:
                entries[2 * count] = -1.0
            _row(model, entries, -infinite, (room - alive) * unit)
        return model

    def _unit(self, room: float) -> float:
        """A power of two."""
        largest = max(room, *(abs(alive) for _, _, alive in self._rows))
        return 2.0 ** min(0, self.LARGEST_BITS - int(largest).bit_length())

    def _forbid(self, model: highspy.Highs, counts: Sequence[int]) -> None:
        """Any other mix has more blocks of some way: one of these columns, each of which says so of a way, is 1."""
        first = model.getNumCol()
        for k, count in enumerate(counts):
            _column(model, 0.0, 1)
            _row(model, {k: -1.0, first + k: count + 1.0}, -highspy.kHighsInf, 0.0)
        _row(model, dict.fromkeys(range(first, first + len(counts)), 1.0), 1.0, highspy.kHighsInf)


def _silent_solver() -> highspy.Highs:
    """A solver. Its constructor greets on standard output, whatever its options, where a command writes its answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            model = highspy.Highs()
            model.silent()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    return model


def _column(model: highspy.Highs, cost: float, most: int) -> None:
    """A whole number from 0 to ``most``."""
    model.addCol(cost, 0.0, float(most), 0, np.array([], dtype=np.int32), np.array([]))
    model.changeColIntegrality(model.getNumCol() - 1, highspy.HighsVarType.kInteger)


def _row(model: highspy.Highs, entries: dict[int, float], low: float, high: float) -> None:
    model.addRow(low, high, len(entries), np.array(list(entries), dtype=np.int32), np.array(list(entries.values())))
