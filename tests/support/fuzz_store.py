"""Random ill-behaved programs over ``sw.shard`` against plain modules. ``make fuzz-store`` runs many.

cd tests && python -m support.fuzz_store --draws 1000 --seed 0
cd tests && python -m support.fuzz_store --replay '{"seed": 3, ...}'

A program trains and sees what the reference sees, or ends in one clear error of ours on a rank. Anything else is a
failure, printed with the fewest steps that still fail: a difference without a word, an error that is not ours or is
longer than a line, a rank that dies or hangs.
"""

from __future__ import annotations

import argparse
import dataclasses
import linecache
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import shardwright
from support import faithful, ranks
from support.ill_behaved import Program, draw
from support.ill_behaved_net import Shape
from support.ill_behaved_run import Different

TIMEOUT, GRACE, PATIENCE = 5.0, 1.0, 20.0
"""Seconds: of a collective; for a clear error of another rank once one has failed; for any answer at all."""
HOME = str(Path(shardwright.__file__).parent)
LOST = ("Connection closed", "Timed out", "Connection reset", "gloo", "Broken pipe")


@dataclass(frozen=True)
class Outcome:
    """kind: trained, raised (where plain torch does), refused; else a failure. told: of a rank that failed."""

    kind: str
    told: str = ""
    trace: str = field(default="", compare=False)

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind in ("trained", "raised", "refused")


# -- on a rank -------------------------------------------------------------------------------------------------------


def on_this_rank(text: str) -> Outcome:
    """How the program of that JSON goes here."""
    warnings.filterwarnings("ignore", "Full backward hook")  # of modules whose inputs want no gradient
    try:
        return Outcome(faithful.run(Program.from_json(text)))
    except Different as caught:
        return Outcome("different", str(caught), traceback.format_exc())
    except BaseException as caught:
        return _judged(caught)


def _judged(caught: BaseException) -> Outcome:
    told, kind = str(caught), "error of others"
    last = traceback.extract_tb(caught.__traceback__)[-1]
    raised = linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
    if any(words in told for words in LOST):
        kind = "lost"
    elif last.filename.startswith(HOME) and raised and isinstance(caught, (RuntimeError, ValueError)):
        kind = "refused" if "\n" not in told and len(told) <= 300 else "long error"
    return Outcome(kind, f"{type(caught).__name__}: {told}", "".join(traceback.format_exception(caught)))


# -- ranks that are forked again after each error --------------------------------------------------------------------


class Pool:
    """Ranks of one number, for one program after the other.

    Where all ranks refuse a program they may go on with another. Should that one fail, it is run again by new ranks,
    and what these say counts.
    """

    def __init__(self) -> None:
        self.world = self.forks = 0
        self._ranks: list[tuple[Any, Any]] = []
        self._refused = False

    def drop(self) -> None:
        """Ends the ranks."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._ranks, self.world, self._refused = [], 0, False

    def run(self, program: Program) -> Outcome:
        """How the program goes."""
        used = self._refused and self.world == program.world
        outcome = self._run(program)
        return self._run(program) if used and not outcome.fine else outcome

    def _run(self, program: Program) -> Outcome:
        if self.world != program.world:
            self.drop()
            self._ranks, self.world = ranks.fork(program.world, TIMEOUT), program.world
            self.forks += 1
        for _, pipe in self._ranks:
            pipe.send((on_this_rank, (program.to_json(),)))
        answers = self._answers()
        kinds = {answer.kind for answer in answers} if len(answers) == self.world else {"hang"}
        if kinds <= {"trained", "raised"}:
            return answers[0] if len(kinds) == 1 else Outcome("different", "some ranks raise, others train")
        if kinds == {"refused"}:
            self._refused = True
            return answers[0]
        self.drop()
        for kind in ("refused", "different", "long error", "error of others", "died", "lost"):
            for answer in answers:
                if answer.kind == kind:
                    return answer
        return Outcome("hang", f"no answer but {[answer.kind for answer in answers]}")

    def _answers(self) -> list[Outcome]:
        """What ranks say, until all have, or one has refused or failed and no other says more in a moment."""
        waiting = {pipe: process for process, pipe in self._ranks}
        answers, end = list[Outcome](), time.monotonic() + PATIENCE
        while waiting and time.monotonic() < end:
            for pipe in wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
                process = waiting.pop(pipe)
                try:
                    fine, answer = pipe.recv()
                except EOFError:
                    process.join()
                    fine, answer = True, Outcome("died", f"a rank died with exit code {process.exitcode}")
                answers.append(answer if fine else Outcome("error of others", answer))
                if answers[-1].kind not in ("trained", "raised", "lost"):
                    end = min(end, time.monotonic() + GRACE)
        return answers


# -- many ------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """outcomes: of each program; failures: those that are not fine, as they are shown; forks: of ranks."""

    forks: int = 0
    outcomes: list[tuple[Program, Outcome]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> Counter[str]:
        """How many went each way."""
        return Counter(outcome.kind for _, outcome in self.outcomes)

    def __str__(self) -> str:
        count = max(1, len(self.outcomes))
        lines = [f"{len(self.outcomes)} programs: " + ", ".join(f"{n} {k}" for k, n in self.kinds.most_common())]
        share = 1 - self.kinds["trained"] / count
        lines.append(f"ended in an error: {share:.1%}; ranks were forked {self.forks} times")
        refusals = Counter(outcome.told[:100] for _, outcome in self.outcomes if outcome.kind == "refused")
        return "\n".join([*lines, *(f"  {n:4} × {words}" for words, n in refusals.most_common(12))])


def fuzz(seeds: Iterable[int], shrink: int = 3, say: Any = None) -> Report:
    """Runs the programs of these seeds, by the number of their ranks. shrink: how many failures are made plainer."""
    report, pool = Report(), Pool()
    try:
        for program in sorted(map(draw, seeds), key=lambda program: program.world):
            outcome = pool.run(program)
            report.outcomes.append((program, outcome))
            if not outcome.fine:
                least = program
                if len(report.failures) < shrink:
                    least, outcome = _shrunk(program, outcome, pool)
                report.failures.append(
                    f"{outcome.kind}: {outcome.told}\n    {least}\n    {least.to_json()}\n{outcome.trace}"
                )
                if say:
                    say(report.failures[-1])
    finally:
        pool.drop()
    report.forks = pool.forks
    return report


def _shrunk(program: Program, outcome: Outcome, pool: Pool, tries: int = 60) -> tuple[Program, Outcome]:
    """A plainer program with fewer steps that still fails in that way: what can be left out, one by one, is."""
    place = 0
    while tries:
        plainer = [less for less in _plainer(program) if less != program]
        if place >= len(plainer):
            break
        found, tries = pool.run(plainer[place]), tries - 1
        if found.kind == outcome.kind:
            program, outcome = plainer[place], found
        else:
            place += 1
    return program, outcome


def _plainer(program: Program) -> Iterator[Program]:
    """Programs that lack one thing: a step, the last ones first; a hook; what is not as by default."""
    for place in reversed(range(len(program.steps))):
        yield dataclasses.replace(program, steps=program.steps[:place] + program.steps[place + 1 :])
    for place in range(len(program.hooks)):
        yield dataclasses.replace(program, hooks=program.hooks[:place] + program.hooks[place + 1 :])
    for each in dataclasses.fields(Shape):
        yield dataclasses.replace(program, shape=dataclasses.replace(program.shape, **{each.name: each.default}))
    for name in ("bucket", "root", "in_flight", "unused", "optimizer", "inputs_train", "replicas"):
        yield dataclasses.replace(program, **{name: getattr(Program(0), name)})


def main() -> int:
    """Runs the command; 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first program; those that follow have the next ones"
    )
    parser.add_argument("--replay", metavar="JSON", help="a program that was printed")
    args = parser.parse_args()
    if args.replay:
        pool = Pool()
        outcome = pool.run(Program.from_json(args.replay))
        pool.drop()
        print(f"{outcome.kind}: {outcome.told}\n{outcome.trace}")
        return 0 if outcome.fine else 1
    start = time.monotonic()
    report = fuzz(range(args.seed, args.seed + args.draws), shrink=20, say=print)
    print(f"{report}\n{time.monotonic() - start:.0f} s; failures: {len(report.failures)}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
