"""What a user asks of the planner, checked as far as it can be before anything slow is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import InputError
from shardwright.files.config_file import read_config
from shardwright.files.sizes import format_bytes, parse_bytes
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan
from shardwright.spec.sharding import one_level

SECONDS = 20.0
"""How long structures are priced, unless more is asked for."""


@dataclass(frozen=True)
class Asked:
    """base: a plan on one device, with the sizes of a step. memory: bytes that a device may hold. level: the only
    sharding level that is looked at, None for all.
    """

    base: Plan
    cluster: Cluster
    memory: int
    level: str | None


def asked(
    config: str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    memory: int | str | None,
    global_batch: int,
    sequence: int,
    dtype: str,
    master_dtype: str | None,
    backend: str,
    level: str | None = None,
    fallback: bool = False,
) -> Asked:
    """What ``sw.plan`` was given; raises InputError, one line."""
    machines = cluster_of(cluster)
    given, memory = memory, machines.memory_bytes if memory is None else parse_bytes(memory, "memory")
    if not isinstance(memory, int) or memory < 1:
        raise InputError(f"memory: found {given!r}; allowed: a size above 0 such as 72GiB")
    if memory > machines.memory_bytes:
        device = f"{format_bytes(machines.memory_bytes)} ({machines.memory_bytes:,} bytes) of {machines.device.name}"
        raise InputError(f"memory: found {format_bytes(memory)} ({memory:,} bytes); allowed: at most the {device}")
    for name, value in (("global_batch", global_batch), ("sequence", sequence)):
        if value < 1:
            raise InputError(f"{name}: found {value}; allowed: at least 1")
    level = None if level is None else one_level(level)
    base = Plan.for_config(
        config,
        mesh={"data": 1},
        layout="replicate",
        micro_batch=global_batch,
        sequence=sequence,
        dtype=dtype,
        master_dtype=None if master_dtype == dtype else master_dtype,
        backend=backend,
        fallback=fallback,
    )
    read_config(base.config_path)
    if machines.links is None and machines.devices > 1:
        raise InputError("links: found null; allowed: the cluster's links, which times are made of")
    return Asked(base, machines, memory, level)


def cluster_of(cluster: Cluster | str | os.PathLike[str]) -> Cluster:
    """A cluster, from a file or by the name of a common machine."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str) and not Path(cluster).exists() and "x" in cluster and not cluster.endswith(".yaml"):
        return Cluster.named(cluster)
    return Cluster.load(cluster)
