"""Steps timed over slow links: turns, disturbance by other programs, bytes on the wire. Used by every rank alike."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from table import DISTURBED

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
ROUTES = Path("/proc/sys/net/ipv4/route/flush")
QUEUED = Path("/proc/sys/net/ipv4/tcp_limit_output_bytes")
"""Of this host's (its network namespace's) connections, each."""


class Steps(Protocol):
    """What can be timed."""

    def clear(self) -> None:
        """Before a step: not timed."""

    def step(self) -> None:
        """One step; everything has arrived when it returns."""


def write(path: Path, data: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(data, indent=1))
    draft.rename(path)


def time_in_turns(
    variants: Sequence[Steps], found: Sequence[dict[str, Any]], rates: Sequence[float], rounds: int, patience: float
) -> None:
    """Times every variant at every rate, round by round, into its ``found["timed"][rate]``: measure → values."""
    for rate in rates:
        limit(rate)
        left = Patience(patience)
        for step in range(rounds):
            for place in turns(len(variants), step):
                times = found[place]["timed"].setdefault(f"{rate:g}", {})
                for key, value in measure(variants[place], left).items():
                    times.setdefault(key, []).append(value)


def turns(count: int, step: int) -> list[int]:
    """The order of one round: each begins one place later, so that no variant always follows the same pause."""
    return [(place + step) % count for place in range(count)]


def limit(rate: float) -> None:
    """From now on this host sends at most ``rate`` Gbit/s.

    After a pause it may send at once what two milliseconds give, at most 256 KiB; more would hand out what a real link
    cannot. The kernel's packets are half as large at most: one that the limit had to cut would take processors, and its
    parts overtake each other. Connections that are there already ask for that size anew when routes are forgotten.
    No more than two packets of a connection wait in the queue: acknowledgements stand in it, too, and behind a message
    of 256 KiB they came so late that the other side took packets for lost, and slowed down for tens of milliseconds.
    """
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        burst = min(int(rate * 1e9 / 8 * 2e-3), 2**18)
        packet = min(burst // 2, 2**16)
        subprocess.run(f"ip link set eth0 gso_max_size {packet}".split(), check=True)
        change = f"tc qdisc change dev eth0 root tbf rate {rate}gbit burst {burst} latency 400ms"
        subprocess.run(change.split(), check=True)
        QUEUED.write_text(str(packet))
        ROUTES.write_text("1")
    dist.barrier()


def measure(variant: Steps, patience: Patience) -> dict[str, float]:
    """One step while no other program runs; while patience lasts, a disturbed one is repeated in a quiet moment."""
    while True:
        began = time.monotonic()
        found = one_step(variant)
        if found["foreign"] <= DISTURBED or not patience.waits(time.monotonic() - began):
            return found


def one_step(variant: Steps) -> dict[str, float]:
    """The slowest rank's wall time, the most processor time of a rank, bytes a rank put on the wire, and ``foreign``:
    the share of all processors' time that went to other programs (the same on every rank).
    """
    variant.clear()
    dist.barrier()
    sent, busy = int(COUNTER.read_text()), busy_seconds()
    processor, wall = time.process_time(), time.perf_counter()
    variant.step()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    dist.barrier()
    busy, sent = busy_seconds() - busy, int(COUNTER.read_text()) - sent
    worst = torch.tensor([wall, processor, sent / int(os.environ["LOCAL_WORLD_SIZE"]), busy], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    own = torch.tensor([processor], dtype=torch.float64)
    dist.all_reduce(own)
    wall, processor, sent, busy = worst.tolist()
    foreign = (busy - own.item()) / (wall * (os.cpu_count() or 1))
    return {"ms": wall * 1e3, "processor_ms": processor * 1e3, "sent": sent, "foreign": foreign}


def busy_seconds() -> float:
    """What all processors have spent on programs since the machine started, and what a hypervisor took from them."""
    user, nice, system, _, _, _, _, steal = (int(word) for word in Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


class Patience:
    """Seconds that may go to waiting for other programs, all measurements together."""

    def __init__(self, seconds: float):
        self.left = seconds

    def waits(self, lost: float) -> bool:
        """Whether patience lasts after ``lost`` seconds; if so, returns in a quiet moment. Rank 0 decides."""
        self.left -= lost
        while self.left > 0 and dist.get_rank() == 0:
            busy = busy_seconds()
            time.sleep(0.5)
            self.left -= 0.5
            if busy_seconds() - busy < 0.5 * DISTURBED * (os.cpu_count() or 1):
                break
        left = torch.tensor([self.left])
        dist.broadcast(left, src=0)
        self.left = left.item()
        return self.left > 0
