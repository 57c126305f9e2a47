"""Agreement: what ranks tell each other before they issue a collective that would go wrong if they differed.

A rank that uses another module than the others would gather or reduce another tensor than they do: gloo then aborts the
process, NCCL hangs or mixes the data. So before each such collective every rank states in a few bytes what it is about
to do. Where all say the same, which is nearly always, one all-reduce of 32 bytes shows it; else every rank hears what
each of the others said, and all act on the same knowledge.

These messages travel between processors, over a gloo group of their own (so they cannot be taken for data, whatever the
others issue); they are no part of a trace, and a rehearsal, which has one rank, agrees with itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardwright import trace
from shardwright.comm.divergence import DivergenceError
from shardwright.comm.groups import AxisGroup
from shardwright.comm.library import few
from shardwright.comm.waits import naming, patience

Facts = Mapping[str, Any]
"""What one rank states: plain data, as JSON holds it."""


@dataclass(frozen=True)
class Answer:
    """What came of one statement. facts: of every rank, by its place in the group; most: the largest count of any."""

    alike: bool
    facts: tuple[Facts, ...]
    most: int


class Agreement:
    """Between the ranks of ``group``, in rank order; a group of one, and a rehearsal's, agrees with itself."""

    def __init__(self, group: AxisGroup):
        self.ranks = tuple(sorted(group.ranks))
        self._over = group
        self._alone = group.size == 1 or dist.get_backend(group.process_group) == "fake"
        self._group: dist.ProcessGroup | None = None
        if not self._alone:
            with unset_fake_temporarily(), trace.quiet():
                self._group = dist.new_group(
                    list(self.ranks), timeout=patience(group), backend="gloo", use_local_synchronization=True
                )

    def state(self, facts: Facts, count: int = 0) -> Answer:
        """States ``facts`` and hears whether every rank states the same; returns when all have stated something.

        count: a number that may differ between ranks that agree. Raises DivergenceError where a rank does not come
        within the group's timeout.
        """
        if self._alone:
            return Answer(True, (facts,), count)
        text = json.dumps(facts, sort_keys=True).encode()
        signature = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        # The collective engine of a rank must not be inside a fake mode, or under a recorder, to speak of itself.
        with unset_fake_temporarily(), trace.quiet(), torch.inference_mode(False), torch.no_grad():
            told = torch.tensor([signature, -signature, count, 0], dtype=torch.int64)
            with naming(self._over, str(facts.get("do", "states something"))):
                dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
                largest, smallest, most, _ = told.tolist()
                if largest == -smallest:
                    return Answer(True, (facts,) * len(self.ranks), most)
                return Answer(False, self._exchange(text), most)

    def _exchange(self, text: bytes) -> tuple[Facts, ...]:
        """What every rank said."""
        sizes = torch.zeros(len(self.ranks), dtype=torch.int64)
        sizes[self.ranks.index(dist.get_rank())] = len(text)
        dist.all_reduce(sizes, group=self._group)
        own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(every, own, group=self._group)
        return tuple(
            json.loads(bytes(said[:size].tolist()).decode()) for said, size in zip(every, sizes.tolist(), strict=True)
        )

    def by_answer(self, said: tuple[str, ...]) -> str:
        """Who said what, as in "rank 0 gathers a; ranks 1, 2 gather b". said: what each rank is quoted with."""
        ranks: dict[str, list[int]] = {}
        for rank, words in zip(self.ranks, said, strict=True):
            ranks.setdefault(words, []).append(rank)
        return "; ".join(f"rank{'s' * (len(who) > 1)} {few(who)} {words}" for words, who in ranks.items())


def agree(agreement: Agreement | None, what: str, count: int = 0, **facts: Any) -> Answer:
    """What ranks say who are about to do ``what``; without an agreement, this rank alone.

    Raises DivergenceError where a rank is about to do something else. Other ``facts`` may differ.
    """
    if agreement is None:
        return Answer(True, (facts,), count)
    answer = agreement.state({"do": what, **facts}, count)
    if not answer.alike and len({said["do"] for said in answer.facts}) > 1:
        told = agreement.by_answer(tuple(f"{said['do']}" for said in answer.facts))
        raise DivergenceError(f"ranks differ: {told}; allowed: parameter groups used alike on every rank")
    return answer
