"""Forked ranks for tests: one pool per world size for the whole run, gloo between them, one thread each.

A test calls ``on_ranks(n, function, *args)``; the function (of a module's top level) runs on every rank, and the list
of what each rank returned comes back. An exception on any rank is raised in the test, with the rank's traceback.

Between calls a pool is stopped (SIGSTOP): each of gloo's groups has a thread that wakes up a hundred times a second,
and dozens of ranks that wait for their next test would take the time of those that work.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import shardwright.simulate.rehearsal  # noqa: F401  (loaded before the fork, so that no rank loads it again)
from shardwright.families.table import FAMILIES

for family in FAMILIES:  # likewise
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")

_POOLS: dict[int, list[tuple[Any, Any]]] = {}
_PR_SET_PDEATHSIG = 1


def _share_one_device() -> None:
    """All groups of this process connect through one device: one thread that wakes up, not one for each group."""
    kind = dist.ProcessGroupGloo
    device = kind.create_default_device()

    class GradientBucketing(kind):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
            options = kind._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = GradientBucketing


def _serve(rank: int, world: int, store: str, pipe: Any, timeout: float) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who is stopped does not see that its parent is gone
    torch.set_num_threads(1)
    _share_one_device()
    gc.freeze()  # what the parent loaded is not garbage: collecting takes a moment, not a fifth of a second
    gc.set_threshold(20_000)  # a rank makes little garbage; looking for it at every 700 objects takes 6 % of its time
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)
        function, args = task
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def fork(world: int, timeout: float = 60) -> list[tuple[Any, Any]]:
    """(process, pipe) of each rank of a new pool, whose collectives give up after ``timeout`` seconds."""
    context = multiprocessing.get_context("fork")
    directory = tempfile.mkdtemp(prefix="ranks")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    pool = []
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, world, f"{directory}/store", there, timeout), daemon=True)
        process.start()
        pool.append((process, here))
    return pool


def _pool(world: int) -> list[tuple[Any, Any]]:
    if world not in _POOLS:
        _POOLS[world] = fork(world)
    return _POOLS[world]


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each of ``world`` ranks."""
    pool = _pool(world)
    for process, pipe in pool:
        os.kill(process.pid, signal.SIGCONT)
        pipe.send((function, args))
    answers = []
    for process, pipe in pool:
        while not pipe.poll(1):
            if not process.is_alive():
                drop(world)
                raise RuntimeError(f"a rank died with exit code {process.exitcode}")
        answers.append(pipe.recv())
    for process, _ in pool:
        os.kill(process.pid, signal.SIGSTOP)
    failures = [answer for fine, answer in answers if not fine]
    if failures:
        drop(world)  # the others may be out of step
        raise AssertionError("\n".join(failures))
    return [answer for _, answer in answers]


def drop(world: int) -> None:
    """Ends the pool of that size, if there is one."""
    for process, _ in _POOLS.pop(world, []):
        process.kill()


@atexit.register
def _stop() -> None:
    for world in list(_POOLS):
        drop(world)
