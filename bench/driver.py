"""What the benchmarks share: their arguments, their rows in namespaces of their own, and what each rank does in one.

A benchmark states its variants, the arguments it adds and its table as a ``Bench`` and gives it to ``start``: that runs
every row where it is called by hand, and measures one where bench/netlab.sh has started the script again as a rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, run
from timing import limit, time_in_turns, write

FAST = 40.0  # Gbit/s, until times are taken


@dataclass(frozen=True)
class Measured:
    """variants: what takes steps. found: what is known of each before times are taken. facts: of all of them."""

    variants: Sequence[Any]
    found: Sequence[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    script: its file, whose docstring is ``about``. task: names of the options that all rows share, rounds and patience
    aside. add: its own arguments. quick: what --quick changes of the options, which ``quick_text`` tells. rows: those
    that the options ask for. measure: on each rank, before times are taken. check: of options; what it returns is wrong
    with them. fast_first: whether the link is fast until times are taken, or as it is in the first rate.
    """

    script: Path
    about: str
    task: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    add: Callable[[argparse.ArgumentParser], None]
    quick: Callable[[argparse.Namespace], None]
    quick_text: str
    rows: Callable[[argparse.Namespace], list[Row]]
    measure: Callable[[argparse.Namespace], Measured]
    markdown: Callable[[dict[str, Any]], str]
    check: Callable[[argparse.Namespace], str | None] = lambda options: None
    fast_first: bool = True

    def arguments(self) -> argparse.Namespace:
        """The options of this command line."""
        parser = argparse.ArgumentParser(description=self.about.split("\n")[0])
        self.add(parser)
        rates, out = list(self.rates), Path(f"build/bench/{self.script.stem}.json")
        waits = "seconds a row may wait for other programs to pause"
        parser.add_argument("--rates", nargs="+", type=float, default=rates, help="Gbit/s that a host sends")
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument("--quick", action="store_true", help=self.quick_text)
        parser.add_argument("--patience", type=float, default=60, help=waits)
        parser.add_argument("--out", type=Path, default=out)
        options = parser.parse_args()
        wrong = self.check(options)
        if wrong is not None:
            parser.error(wrong)
        if options.quick:
            options.rates, options.rounds = [1.0], min(options.rounds, 3)
            self.quick(options)
        return options

    def start(self) -> None:
        """Runs every row, or measures as one rank of a row."""
        options = self.arguments()
        if "LOCAL_RANK" in os.environ:
            self._work(options)
            return
        task = {key: getattr(options, key) for key in (*self.task, "rounds", "patience")}
        results = run(self.script, task, options.rates, self.rows(options))
        write(options.out, results)
        print(self.markdown(results))

    def _work(self, options: argparse.Namespace) -> None:
        """Measures all variants at all rates; rank 0 writes what was found."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        if self.fast_first:
            limit(FAST)
        measured = self.measure(options)
        time_in_turns(measured.variants, measured.found, options.rates, options.rounds, options.patience)
        if dist.get_rank() == 0:
            write(options.out, {"variants": measured.found, **measured.facts})
        dist.barrier()
        dist.destroy_process_group()


def add_hosts_by_ranks(parser: argparse.ArgumentParser) -> None:
    """``--hosts-by-ranks``: the rows, each of which is named alone."""
    parser.add_argument("--hosts-by-ranks", nargs="+", default=["2x1", "2x2"], metavar="HxR")
