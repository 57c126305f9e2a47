"""What a launcher tells each rank that it starts, and how ranks that refuse their input end together."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from shardwright.errors import BAD_INPUT, DOES_NOT_FIT, DoesNotFit, InputError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

REFUSAL_SECONDS = 30.0
"""How long a rank that refuses its input waits for the others to refuse it too."""

POLL_SECONDS = 0.02
"""How often a rank that waits for the others asks the store."""


@dataclass(frozen=True)
class Place:
    """Where this process stands, as the launcher tells it: rank and world over all hosts, local on this one.

    local_world: ranks of this host; all of them where the launcher does not tell.
    """

    rank: int
    world: int
    local: int
    local_world: int

    @classmethod
    def from_environment(cls, command: str) -> Place:
        """InputError, with how to start the ranks, where no launcher set the environment.

        command: what follows ``shardwright``, such as ``train RUN.yaml``.
        """
        try:
            rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            return cls(rank, world, local, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        except (KeyError, ValueError):
            raise InputError(
                f"{command.split()[0]}: found no RANK, WORLD_SIZE and LOCAL_RANK in the environment; allowed: "
                f"python -m torch.distributed.run --nproc-per-node N -m shardwright {command}"
            ) from None


def join(place: Place) -> Store:
    """The store that the launcher's ranks share. InputError where its port is in use by something else."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isascii() or not port.isdigit():
        raise InputError(
            f"MASTER_ADDR, MASTER_PORT: found {host or 'nothing'}, {port or 'nothing'} in the environment; "
            "allowed: the address and port of rank 0, as the launcher sets them"
        )

    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    try:
        store: Store
        store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        return store
    except DistNetworkError as error:
        if "in use" in str(error):
            raise InputError(f"MASTER_PORT: found {port}, which is in use; allowed: a free port") from None
        raise InputError(f"MASTER_ADDR: found {host}:{port}, where no rank 0 answers; allowed: its address") from None


def tell(error: Exception, place: Place) -> None:
    """The one line of bad input, from rank 0."""
    if place.rank == 0:
        print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)


def refuse(error: InputError | DoesNotFit, place: Place, store: Store, told: bool = False) -> NoReturn:
    """Ends this rank with the error's exit status, not before every rank refuses: the launcher ends the others when
    the first has exited. told: its line was printed before.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not told:
        tell(error, place)
    deadline = time.monotonic() + REFUSAL_SECONDS
    try:
        refused = store.add("shardwright/refused", 1)
        while refused < place.world and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            refused = store.add("shardwright/refused", 0)
    except RuntimeError:  # the store left with the rank that holds it, which saw all refuse
        pass
    sys.exit(DOES_NOT_FIT if isinstance(error, DoesNotFit) else BAD_INPUT)
