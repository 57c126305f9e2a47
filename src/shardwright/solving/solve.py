"""The fastest assignment of equal blocks under a memory limit: an integer program, solved to the optimum.

A model is a fixed cost (embedding, norms, head, loss, optimizer step) around L blocks. Each block takes one of K
options, and blocks of one option stand together, in the order of the options. x_k blocks take option k:

    least   T₀ + Σ t_k·x_k          with  Σ x_k = L

What is alive at the worst moments must stay within the memory limit M, where R₀ and r_k are alive all the time, a
forward of a block adds f_k and needs F_k at most, its backward adds b_k (a gradient less what was saved) and needs G_k
at most:

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

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np


@dataclass(frozen=True)
class BlockOption:
    """What one option costs a block: seconds of a step, and bytes (the module's table).

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
    """A solution: how many blocks take each option; seconds; a bound that no assignment beats; bytes at the worst
    moment.
    """

    counts: tuple[int, ...]
    seconds: float
    bound: float
    peak: int


def seconds_of(fixed_cost: FixedCost, options: Sequence[BlockOption], counts: Sequence[int]) -> float:
    """The objective of an assignment."""
    return fixed_cost.seconds + sum(option.seconds * count for option, count in zip(options, counts, strict=True))


def peak_of(fixed_cost: FixedCost, options: Sequence[BlockOption], counts: Sequence[int]) -> int:
    """Bytes alive at the worst moment of an assignment, line by line as the module's table has them."""
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


def fastest(fixed_cost: FixedCost, options: Sequence[BlockOption], blocks: int, memory: int) -> Assignment | None:
    """The fastest assignment of ``blocks`` blocks within ``memory`` bytes; None where there is none."""
    return Program(fixed_cost, options, blocks).fastest(memory)


def leanest(fixed_cost: FixedCost, options: Sequence[BlockOption], blocks: int) -> Assignment:
    """The assignment that needs least memory (its ``peak``)."""
    return Program(fixed_cost, options, blocks).leanest()


class Program:
    """The integer program of some options: HiGHS's model is built once, a solve changes its bounds and costs.

    Columns x_1…x_K (integers), y_1…y_K (0 or 1), and, without a memory limit, the peak z.

    The solver takes what is within its tolerance for equal. So bytes are counted in units of which the largest sum has
    some thousand, where the tolerance is below a byte and rounding far below it, and costs in units of which the
    dearest option has a thousand; and an assignment that is over the limit after all, by a byte, is forbidden by name.

    No start is given, and what the solve before left is cleared: from a start HiGHS 1.16 ends where it began, now and
    then, if its presolve is on, and with presolve off its cuts at these tolerances have taken the fastest assignment
    away.
    """

    LARGEST_BITS = 10
    TOLERANCE = 1e-9
    DEAREST = 1e3

    def __init__(self, fixed_cost: FixedCost, options: Sequence[BlockOption], blocks: int):
        self.fixed_cost, self.options, self.blocks = fixed_cost, options, blocks
        self._rows: list[tuple[list[float], list[float], float]] = []  # coefficients of x and y, constant
        self._models: dict[tuple[float, bool], _Solver] = {}  # by the unit of bytes, and whether memory is limited
        self.within(None)
        self._lines()

    def fastest(self, memory: int) -> Assignment | None:
        """The fastest assignment within ``memory`` bytes; None where there is none."""
        self.within(memory)
        return self.solve([option.seconds for option in self.options], 0.0, self.fixed_cost.seconds)

    def leanest(self) -> Assignment:
        """The assignment that needs least memory (its ``peak``)."""
        self.within(None)
        found = self.solve([0.0] * len(self.options), 1.0, 0.0)
        assert found is not None  # without a memory limit every assignment is allowed
        # the solver weighs peaks by its tolerance, a memory limit is kept to the byte
        while (leaner := self.fastest(found.peak - 1)) is not None:
            found = leaner
        seconds = seconds_of(self.fixed_cost, self.options, found.counts)
        return Assignment(found.counts, seconds, seconds, found.peak)

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

    def within(self, memory: int | None) -> None:
        """What is alive at every moment is at most ``memory`` bytes; None: at most z."""
        self.memory = memory

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
            if self.memory is None or peak <= self.memory:
                break
            self._forbid(model, counts)
        seconds, info = seconds_of(self.fixed_cost, self.options, counts), model.getInfo()
        bound = seconds  # a gap of 0 says that nothing is left to look at; mip_dual_bound may lag behind then
        if info.mip_gap > 0:
            bound = min(seconds, constant + float(info.mip_dual_bound) / scaled)
        return Assignment(counts, seconds, bound, peak)

    def _model(self, costs: Sequence[float], peak_cost: float) -> _Solver:
        """The model with these costs, and with the bounds of the memory limit."""
        count, limited = len(self.options), self.memory is not None
        memory = float(self.memory or 0)
        unit = self._unit(memory)
        if (unit, limited) not in self._models:
            self._models[unit, limited] = self._built(unit, limited)
        model = self._models[unit, limited]
        model.restore()
        for k, cost in enumerate(costs):
            model.changeColCost(k, cost)
        if not limited:
            model.changeColCost(2 * count, peak_cost)
        for number, (_, _, alive) in enumerate(self._rows, start=1 + count):
            model.changeRowBounds(number, -highspy.kHighsInf, (memory - alive) * unit)
        return model

    def _built(self, unit: float, limited: bool) -> _Solver:
        """The model without costs. Its rows: all blocks, each x_k against its y_k, then what is alive."""
        count, infinite = len(self.options), highspy.kHighsInf
        model = _Solver(self.TOLERANCE)
        for _ in range(count):
            _column(model, 0.0, self.blocks)
        for _ in range(count):
            _column(model, 0.0, 1)
        if not limited:
            model.addCol(0.0, -infinite, infinite, 0, np.array([], dtype=np.int32), np.array([]))
        _row(model, dict.fromkeys(range(count), 1.0), float(self.blocks), float(self.blocks))
        for k in range(count):
            _row(model, {k: 1.0, count + k: -float(self.blocks)}, -infinite, 0.0)
        for x, y, _ in self._rows:
            entries = {k: value * unit for k, value in enumerate([*x, *y]) if value}
            if not limited:
                entries[2 * count] = -1.0
            _row(model, entries, -infinite, infinite)
        model.built()
        return model

    def _unit(self, memory: float) -> float:
        """A power of two."""
        largest = max(memory, *(abs(alive) for _, _, alive in self._rows))
        return 2.0 ** min(0, self.LARGEST_BITS - int(largest).bit_length())

    def _forbid(self, model: _Solver, counts: Sequence[int]) -> None:
        """Any other assignment has more blocks of some option: one of these columns, each of which says so of an
        option, is 1.
        """
        first = model.getNumCol()
        for k, count in enumerate(counts):
            _column(model, 0.0, 1)
            _row(model, {k: -1.0, first + k: count + 1.0}, -highspy.kHighsInf, 0.0)
        _row(model, dict.fromkeys(range(first, first + len(counts)), 1.0), 1.0, highspy.kHighsInf)


class _Solver(highspy.Highs):
    """HiGHS without a word on standard output, where a command writes its answer."""

    def __init__(self, tolerance: float):
        super(highspy.Highs, self).__init__()  # Highs's own sets callbacks up, and HiGHS greets before it has options
        kinds = ("mip_feasibility", "primal_feasibility", "dual_feasibility")
        options = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1, "small_matrix_value": 1e-12}
        options |= {f"{kind}_tolerance": tolerance for kind in kinds}
        for name, value in ({"output_flag": False} | options).items():
            self.setOptionValue(name, value)
        self._columns = self._lines = 0

    def built(self) -> None:
        """What was added so far is the model; what comes later, `restore` takes away."""
        self._columns, self._lines = self.getNumCol(), self.getNumRow()

    def restore(self) -> None:
        """The model as it was built, and nothing of an earlier solve."""
        for first, last, delete in (
            (self._lines, self.getNumRow(), self.deleteRows),
            (self._columns, self.getNumCol(), self.deleteCols),
        ):
            if last > first:
                delete(last - first, np.arange(first, last, dtype=np.int32))
        self.clearSolver()


def _column(model: _Solver, cost: float, most: int) -> None:
    """A whole number from 0 to ``most``."""
    model.addCol(cost, 0.0, float(most), 0, np.array([], dtype=np.int32), np.array([]))
    model.changeColIntegrality(model.getNumCol() - 1, highspy.HighsVarType.kInteger)


def _row(model: _Solver, entries: dict[int, float], low: float, high: float) -> None:
    model.addRow(low, high, len(entries), np.array(list(entries), dtype=np.int32), np.array(list(entries.values())))
