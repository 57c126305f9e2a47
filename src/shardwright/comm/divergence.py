"""Ranks that do not issue the same collectives: what each issued last, and the words for the first that differs.

A certificate compares whole traces by it before a run; a wait that fails compares the last of each rank (waits.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.comm.library import few

KEPT = 128
"""How many of the last collectives over each set of ranks are remembered."""


class DivergenceError(RuntimeError):
    """Ranks would wait for each other for ever; the message names the first collective on which they do not agree."""


class Issued(NamedTuple):
    """One logical collective, as all members must issue it. size: bytes of the full tensor."""

    kind: str
    axes: tuple[str, ...]
    size: int
    module: str

    def __str__(self) -> str:
        return told(self.kind, self.axes, self.size, self.module or "no module")


def told(kind: str, axes: Sequence[str], size: int, where: str) -> str:
    """A collective in a message. where: its module, and more."""
    return f"{kind} over {'×'.join(axes)} of {size:,} bytes ({where})"


def disagreement(index: int, ranks: Sequence[int], doings: Iterable[tuple[int, str]]) -> str:
    """The message: what each of some ranks does as the group's collective number ``index``."""
    said = ", ".join(f"rank {rank} {doing}" for rank, doing in doings)
    return f"collective {index} of the group of ranks {few(ranks)}: {said}"


class LastIssued:
    """The last collectives that this rank issued over one set of ranks, numbered from 0.

    book: those of all sets of ranks of a mesh, this one among them.
    """

    def __init__(self, ranks: tuple[int, ...] = (), book: dict[tuple[int, ...], LastIssued] | None = None):
        self.count = 0
        self.paused = 0
        self.recent: deque[Issued] = deque(maxlen=KEPT)
        self.book = {} if book is None else book
        self.book[ranks] = self

    def add(self, issued: Issued) -> int:
        """One more; returns its number."""
        if not self.paused:
            self.recent.append(issued)
            self.count += 1
        return self.count - 1

    def grow(self, number: int, size: int) -> None:
        """More has joined that one: its bytes are ``size`` now."""
        place = number - self.count + len(self.recent)
        if place >= 0:
            self.recent[place] = self.recent[place]._replace(size=size)


# -- what a rank says of itself, and what follows ----------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """What one rank issued last over each set of ranks, from number ``first`` on, and what it waits for: collective
    ``number`` over ``ranks``, or that they all state what comes before it (``stated``, a verb and its objects).
    """

    issued: Mapping[tuple[int, ...], tuple[int, tuple[Issued, ...]]]
    ranks: tuple[int, ...]
    number: int
    stated: str = ""

    @classmethod
    def of(
        cls, book: Mapping[tuple[int, ...], LastIssued], ranks: tuple[int, ...], number: int, stated: str = ""
    ) -> Account:
        """What this rank says of itself."""
        issued = {key: (each.count - len(each.recent), tuple(each.recent)) for key, each in book.items()}
        return cls(issued, ranks, number, stated)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "issued": [[key, first, recent] for key, (first, recent) in self.issued.items()],
            "ranks": self.ranks,
            "number": self.number,
            "stated": self.stated,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Account:
        issued = {
            tuple(key): (first, tuple(Issued(kind, tuple(axes), size, module) for kind, axes, size, module in recent))
            for key, first, recent in data["issued"]
        }
        return cls(issued, tuple(data["ranks"]), data["number"], data["stated"])

    def at(self, ranks: tuple[int, ...], number: int) -> Issued | None:
        """Its collective of that number over these ranks; None if it has issued fewer, or no longer knows."""
        first, recent = self.issued.get(ranks, (0, ()))
        return recent[number - first] if 0 <= number - first < len(recent) else None

    def until(self, ranks: tuple[int, ...]) -> int:
        """How many it has issued over these ranks."""
        first, recent = self.issued.get(ranks, (0, ()))
        return first + len(recent)

    @property
    def doing(self) -> str:
        """What it does at that number."""
        return self.stated or f"issues {self.at(self.ranks, self.number) or 'what is long ago'}"

    def meets(self, other: Account) -> bool:
        """Whether ``other`` has come to where this one waits."""
        if self.stated:
            return bool(other.stated) and other.ranks == self.ranks
        return other.until(self.ranks) > self.number


def diagnosis(me: int, accounts: Mapping[int, Account]) -> str:
    """Why ``me`` waits in vain, as the accounts of those ranks that were heard of tell it."""
    mine = accounts[me]
    groups = sorted({ranks for each in accounts.values() for ranks in each.issued}, key=lambda each: each != mine.ranks)
    for ranks in groups:
        found = _first_difference(ranks, accounts)
        if found is not None:
            return found
    seen, asked = set[int](), me
    while asked not in seen:
        seen.add(asked)
        account = accounts[asked]
        doing = (asked, account.doing)
        silent = [rank for rank in account.ranks if rank not in accounts]
        if silent:
            return disagreement(
                account.number, account.ranks, [doing, *((rank, "did not come") for rank in silent[:8])]
            )
        behind = [rank for rank in account.ranks if not account.meets(accounts[rank])]
        if not behind:
            return disagreement(account.number, account.ranks, [doing]) + ", as all ranks do, and it failed"
        asked = behind[0]
        first = disagreement(account.number, account.ranks, [doing, (asked, "issues none")])
    there = accounts[asked]
    return f"{first} but waits at collective {there.number} of ranks {few(there.ranks)}, where it {there.doing}"


def _first_difference(ranks: tuple[int, ...], accounts: Mapping[int, Account]) -> str | None:
    members = [rank for rank in ranks if rank in accounts and ranks in accounts[rank].issued]
    best: tuple[int, int, int] | None = None
    for other in members[1:]:
        one, two = accounts[members[0]], accounts[other]
        start = max(one.issued[ranks][0], two.issued[ranks][0])
        for number in range(start, min(one.until(ranks), two.until(ranks))):
            if one.at(ranks, number) != two.at(ranks, number):
                best = min(best or (number, members[0], other), (number, members[0], other))
                break
    if best is None:
        return None
    number, *pair = best
    return disagreement(number, ranks, [(rank, f"issues {accounts[rank].at(ranks, number)}") for rank in pair])
