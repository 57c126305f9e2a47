"""``sw.plan``: what a user asks of the planner, checked; and what takes several searches to answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from shardwright.errors import DoesNotFit, InputError
from shardwright.families.table import family_of, has_rule
from shardwright.models.config import load_config
from shardwright.models.positions import check_positions
from shardwright.search.explore import Tell
from shardwright.search.search import Found, search
from shardwright.search.unsplit import search_unsplit
from shardwright.space.problem import Problem
from shardwright.space.request import SECONDS, Asked, asked
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan


def plan(
    config: str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    memory: int | str | None = None,
    global_batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    master_dtype: str | None = "float32",
    backend: str = "nccl",
    level: str | None = None,
    seconds: float = SECONDS,
    fallback: bool = False,
) -> Plan:
    """The fastest plan that fits, certified by a rehearsal.

    config: a Hugging Face config.json, or a directory that holds one. cluster: a Cluster, a cluster file, or a common
    machine such as ``8xH100-80GB``. memory: limit for the peak of a device, bytes or a size such as ``72GiB``, no more
    than the device has; by default all of it. global_batch: sequences of a step over the whole cluster; the plan may
    cut them into micro-batches (its ``micro_batch`` × ``accumulation``). sequence: tokens of a sequence. dtype,
    master_dtype, backend: as in a plan file. level: the only sharding level to look at (replicate, optimizer,
    gradients, parameters); by default all.
    seconds: how long to search. fallback: take a model without a rule table too, its linears unsplit: the best
    data-parallel plan of it, of which every option is rehearsed, however long that takes.

    Raises InputError for bad input, DoesNotFit where no plan fits, with the least memory that works.
    """
    ask = asked(config, cluster, memory, global_batch, sequence, dtype, master_dtype, backend, level, fallback)
    if runs_unsplit(ask):
        return search_unsplit(ask).plan
    return search(problem_of(ask), seconds).plan


def runs_unsplit(ask: Asked) -> bool:
    """Whether the model has no rule table, and fallback was asked for."""
    return ask.base.fallback and not has_rule(load_config(ask.base.config_path))


def problem_of(ask: Asked) -> Problem:
    """The problem of what was asked. Raises InputError where the model has no rule table, or too few positions."""
    loaded = load_config(ask.base.config_path)
    family_of(loaded)
    check_positions(loaded, ask.base.sequence)
    return Problem(loaded, ask.base, ask.cluster, ask.cluster.devices, ask.memory, ask.level)


def least_devices(problem: Problem, seconds: float, tell: Tell) -> Found:
    """The answer on the fewest devices on which something fits: counts that divide the cluster's, smallest first."""
    refused: DoesNotFit | InputError | None = None
    for devices in _counts(problem.devices):
        tell(f"{devices} devices")
        try:
            return search(replace(problem, devices=devices), seconds, tell=tell)
        except (DoesNotFit, InputError) as error:
            refused = error
    assert refused is not None
    raise refused


def longest_sequence(problem: Problem, seconds: float, tell: Tell) -> Found:
    """The answer for the longest sequence, of those asked for times a power of two, with which something fits."""
    return _doubled("sequence", search(problem, seconds, tell=tell), seconds, tell)


def largest_batch(problem: Problem, seconds: float, tell: Tell) -> Found:
    """The answer for the most sequences, of the batch asked for times a power of two, that one micro-batch has room
    for. In several micro-batches any batch fits that fits in one.
    """
    return _doubled("micro_batch", search(replace(problem, whole=True), seconds, tell=tell), seconds, tell)


def _doubled(size: str, found: Found, seconds: float, tell: Tell) -> Found:
    """The answer with a size of the base plan doubled as often as something fits."""
    while True:
        larger = 2 * getattr(found.problem.base, size)
        tell(f"a {size.replace('_', '-')} of {larger}")
        try:
            base = found.problem.base.evolve(**{size: larger})
            found = search(replace(found.problem, base=base), seconds, tell=tell)
        except (DoesNotFit, InputError):
            return found


def _counts(devices: int) -> Iterator[int]:
    yield from (count for count in range(1, devices + 1) if devices % count == 0)
