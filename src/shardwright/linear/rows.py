"""Whether the ranks of a site bring as many rows each, where nobody tells how many there are in all.

Ranks that hold unlike parts would wait for messages of other sizes than come: gloo ends the process, NCCL hangs. They
are asked through the launcher's store, not by a collective, and only when this rank's own number has changed: a site
that is given as many rows in every call asks once.
"""

from __future__ import annotations

import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.runtime.runtime import Runtime


class RowsAgree:
    """Compares the rows of this rank with those of the ranks that its site shares work with.

    axes: those that split features, n and k: over these, every rank holds as many rows of X.
    """

    def __init__(self, runtime: Runtime, axes: tuple[str, ...], name: str):
        self.name, self.ranks = name, runtime.groups.members(axes)
        self._key: str | None = None
        self._rows: int | None = None
        self._calls = 0
        self._told: str | None = None

    def check(self, rows: int) -> None:
        """Raises InputError, on every rank whose number has changed, unless all have the same."""
        self._calls += 1
        if rows == self._rows or len(self.ranks) == 1 or dist.get_backend() == "fake":
            return
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        if self._key is None:  # sites of the same ranks are numbered by their first calls: the order of the program
            among = f"shardwright/rows/{','.join(map(str, self.ranks))}"
            self._key = f"{among}/{store.add(f'{among}/{rank}', 1)}"
        key = f"{self._key}/{self._calls}"
        store.set(f"{key}/{rank}", str(rows))
        try:
            found = {member: int(store.get(f"{key}/{member}")) for member in self.ranks}
        except dist.DistStoreError:
            found = {}
        if set(found.values()) != {rows}:
            others = [f"{held} on rank {member}" for member, held in found.items() if held != rows]
            raise InputError(
                f"{self.name}: found {rows} rows on rank {rank} and {(others or ['no word of the others'])[0]}; "
                "allowed: as many on every rank, or tokens= with the rows of all ranks together"
            )
        if self._told is not None:  # whoever has told this time has read the last
            store.delete_key(self._told)
        self._rows, self._told = rows, f"{key}/{rank}"
