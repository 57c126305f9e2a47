"""The planner in tests: a tiny Llama on two hosts of two devices, rehearsals shared by all searches of this process."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from shardwright.pricing import compose, price
from shardwright.pricing import rehearsed_bounds as rehearsed_bound
from shardwright.search import explore, search
from shardwright.search import neighbours as beside
from shardwright.search.plan import problem_of
from shardwright.space import space
from shardwright.space.problem import Problem
from shardwright.space.request import asked
from shardwright.space.space import Structure, structures
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan
from shardwright.stretching.runs import rehearse_few
from shardwright.trace import Trace
from support import tiny

BLOCKS = 3
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "num_hidden_layers": BLOCKS,
    "max_position_embeddings": 128,
}


def cluster(within: float = 1e9, between: float = 1e8, latency: float = 1e-6, memory: int = 2**30) -> Cluster:
    """Two hosts of two devices. within, between: bytes per second; latency: seconds of either link."""
    return Cluster.model_validate(
        {
            "version": 2,
            "hosts": 2,
            "devices_per_host": 2,
            "device": {"name": "small", "memory": memory, "flops": {"float32": 1e11}, "memory_bandwidth": 1e11},
            "links": {
                "within_host": {"latency": latency, "bandwidth": within},
                "between_hosts": {"latency": latency, "bandwidth": between},
            },
        }
    )


@functools.cache
def small() -> Path:
    """The config of SIZES: one file, so that equal plans of all tests are equal."""
    return tiny.config_path(**SIZES)


def problem(
    machines: Cluster, memory: int | None = None, batch: int = 4, sequence: int = 128, path: Path | None = None
) -> Problem:
    """What ``shardwright plan`` would ask of the search."""
    return problem_of(asked(path or small(), machines, memory, batch, sequence, "float32", None, "gloo"))


class Here(Executor):
    """A pool without processes: everything at once, in this one."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments, **named))
        return done

    def map(self, work: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        return (work(*each) for each in zip(*iterables, strict=True))


KNOWN: dict[str, bytes] = {}
"""Plan → its trace, pickled: millions of live objects would slow every collection, and every fork."""


def remembered(family: Any, config: Any, plan: Plan, rank: int, steps: int, short: Any) -> Trace:
    """The rehearsal, done once for equal plans: it knows nothing of the cluster."""
    key = f"{config.to_json_string()} {plan.model_dump_json()} {rank} {steps} {short}"
    if key not in KNOWN:
        KNOWN[key] = pickle.dumps(rehearse_few(family, config, plan, rank, steps, short))
    return pickle.loads(KNOWN[key])


def few(*asked: Any) -> Iterator[Structure]:
    """Plain structures on one tensor axis, with one micro-batch; parameters are whole, or split over all."""
    for each in (each for each in structures(*asked) if each.plain):
        levels = ("replicate", "parameters") if each.tensor == 1 else ("replicate",)
        if each.accumulation == 1 and each.l == 1 and each.level in levels and not each.keep:
            yield each


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches in this process, of few structures and modes, that share their rehearsals."""
    monkeypatch.setattr(search, "rehearsing", lambda workers: Here())
    for module in (space, explore, beside):
        monkeypatch.setattr(module, "CHUNKED", ())
    monkeypatch.setattr("shardwright.space.problem.structures", few)
    monkeypatch.setattr(price, "rehearse_few", remembered)
    monkeypatch.setattr(compose, "rehearse_few", remembered)
    monkeypatch.setattr(rehearsed_bound, "rehearse_few", remembered)


def searched(asked: Problem) -> search.Found:
    """The answer, whatever the time it takes."""
    return search.search(asked, seconds=3600)
