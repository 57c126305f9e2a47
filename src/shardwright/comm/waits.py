"""Waits that name what went wrong: where one fails, ranks tell each other what they issued last, and who did not come.

They do so through the store of the job, which needs no collective. So the error of every rank that waits names the
first collective on which ranks do not agree, its module and the ranks, within the timeout that was stated. While all
goes well nothing travels, and no thread runs. On NCCL a wait does not hold the host, and torch's watchdog ends the
process; where it raises instead (TORCH_NCCL_BLOCKING_WAIT=1) the error is named alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from shardwright.comm.divergence import Account, DivergenceError, diagnosis
from shardwright.comm.groups import AxisGroup

WINDOW = 2.0
"""Seconds of a timeout, at most a quarter of it, that are kept for hearing of the others."""

LONGEST = 300
"""Characters of a message beyond which torch's own words are left to the error that is behind it."""


def await_work(work: dist.Work, group: AxisGroup, number: int | None = None) -> None:
    """Waits for ``work`` of the group's collective ``number``, by default the last one.

    Raises DivergenceError where it fails, or takes longer than was stated for the group.
    """
    try:
        limit = patience(group)
        if limit is None or group.backend == "nccl":
            work.wait()
        else:
            work.wait(limit)
    except RuntimeError as error:
        raise explained(error, group, number) from error


@contextmanager
def naming(group: AxisGroup, stated: str = "") -> Iterator[None]:
    """Around calls of torch.distributed among the group's ranks: their RuntimeError is raised as a DivergenceError.

    stated: what this rank stated, where the others' statements are waited for ("gathers blocks.0 in forward").
    """
    try:
        yield
    except DivergenceError:
        raise
    except RuntimeError as error:
        raise explained(error, group, stated=stated) from error


def patience(group: AxisGroup) -> timedelta | None:
    """How long a wait may take, so that its error is named within the group's timeout; None where none was stated."""
    return None if group.timeout is None else group.timeout - timedelta(seconds=window(group))


def window(group: AxisGroup) -> float:
    """Seconds for which other ranks are listened for after a failure."""
    return WINDOW if group.timeout is None else min(WINDOW, group.timeout.total_seconds() / 4)


def explained(error: RuntimeError, group: AxisGroup, number: int | None = None, stated: str = "") -> DivergenceError:
    """The error of a wait over the group, with what all ranks say of themselves. Takes at most ``window`` seconds.

    stated: what this rank stated, where it waited for the others' statements.
    """
    me = group.ranks[group.index]
    here = group.issued.count if stated else group.issued.count - 1
    accounts = {me: Account.of(group.issued.book, group.ranks, here if number is None else number, stated)}
    with suppress(RuntimeError):  # the store may be gone with the rank that held it: what is known is told
        _listen(me, accounts, window(group))
    found = diagnosis(me, accounts)
    torch_said = str(error).splitlines()[0].rpartition("] ")[2]  # without the file that it comes from
    both = f"{found}. torch: {torch_said}"
    return DivergenceError(both if len(both) <= LONGEST else found)


def _listen(me: int, accounts: dict[int, Account], seconds: float) -> None:
    """Tells the others, and hears of those that this rank waits for, and of those that they wait for."""
    store = dist.distributed_c10d.PrefixStore("shardwright/waits", dist.distributed_c10d._get_default_store())
    store.set(str(me), json.dumps(accounts[me].to_json()))
    until = time.monotonic() + seconds
    while True:
        missing = {rank for account in accounts.values() for rank in account.ranks} - set(accounts)
        for rank in sorted(missing):
            if store.check([str(rank)]):
                accounts[rank] = Account.from_json(json.loads(store.get(str(rank))))
        if not missing or time.monotonic() > until:
            return
        time.sleep(0.02)
