"""The profile: what the machine under the ranks does, measured with the code that trains, as a cluster file.

    python -m torch.distributed.run --nproc-per-node N -m shardwright profile -o cluster.yaml

Measured are the runtime's collectives over groups of every shape (how many ranks, over how many hosts), alone and
beside products; products by shape and element type; memory; the least operator. Always all ranks are at work at once.
Bad input is one line from rank 0 and exit status 2 on every rank.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.comm.launched import Place, join, refuse
from shardwright.errors import InputError
from shardwright.files.old_words import VERSION
from shardwright.files.replacing import check_directory
from shardwright.profile import collectives, products
from shardwright.profile.progress import MeasuringProgress
from shardwright.profile.stopwatch import Stopwatch
from shardwright.runtime.runtime import Runtime
from shardwright.spec.cluster import Cluster, Device, Link, Links, Measured, Product
from shardwright.spec.mesh import parse_mesh, ranks_along, world_size

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PRODUCTS = ("float32", "bfloat16", "float16", "float64")
"""Element types whose products can be measured."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    messages: bytes to send, smallest first. sizes: of m, n and k; limit: the most multiplications of a product.
    beside: m = n = k of the product that runs beside collectives. repetitions: of each measurement, an odd number;
    least: seconds of each.
    """

    messages: tuple[int, ...]
    sizes: tuple[int, ...]
    limit: int
    beside: int
    repetitions: int
    least: float = 0.05

    @classmethod
    def of(cls, device: str, quick: bool) -> Effort:
        """For a kind of device (cpu, cuda)."""
        # More of the large ones: they tell the bandwidth, and take most of a step.
        fewest = (2**10, 2**14, 2**18, 2**20, 2**21, 2**22)
        messages = fewest if quick else tuple(sorted((*fewest, 2**12, 2**16, 2**19, 2**23)))
        repetitions = 3 if quick else 5
        if device == "cuda":
            large = (256, 2048, 8192) if quick else (128, 512, 2048, 8192, 16384)
            return cls((*messages, 2**24, 2**26, 2**28), large, 2**40, 4096, repetitions)
        if quick:
            return cls(messages, (64, 512, 2048), 2**27, 256, repetitions, least=0.02)
        return cls(messages, (64, 256, 1024, 4096), 2**30, 256, repetitions)


def profile(output: Path, mesh: str | None, dtypes: Sequence[str], quick: bool) -> None:
    """Measures, on this rank among the launcher's, and lets rank 0 write ``output``. Exits with 2 on bad input.

    mesh: axes whose groups are measured, such as ``data=2,tensor=2``; by default groups of every size. dtypes: element
    types of products; none: those that the device is made for.
    """
    place = Place.from_environment(f"profile -o {output}")
    store = join(place)
    try:
        axes = _axes(mesh, place)
        _check_dtypes(dtypes)
        device = _agreed_device(output, place, store)
    except InputError as error:
        refuse(error, place, store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world)
    try:
        root = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        chosen = dtypes or (["bfloat16", "float32"] if device.type == "cuda" else ["float32"])
        cluster = measure(root, place.local_world, chosen, Effort.of(device.type, quick), device)
        if place.rank == 0:
            cluster.save(output)
            print(summary(cluster), flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(mesh: DeviceMesh, per_host: int, dtypes: Sequence[str], effort: Effort, device: torch.device) -> Cluster:
    """What was found with the ranks of ``mesh``, ``per_host`` in a row on each host; on every rank the same."""
    assert mesh.mesh_dim_names is not None
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    watch = Stopwatch(device, effort.repetitions, effort.least)
    groups = list(shapes(sizes, per_host))
    grid = list(products.shapes(effort.sizes, effort.limit))
    total = len(groups) * len(collectives.MESSAGES) + len(grid) * len(dtypes) + 2
    with MeasuringProgress(total, silent=dist.get_rank() != 0) as progress:
        progress.show("operators")
        overhead = products.overhead(watch)
        progress.show("memory")
        bandwidth = products.memory_bandwidth(watch)
        multiplied: list[Product] = []
        for dtype in dtypes:
            for shape in grid:
                progress.show(f"products in {dtype}")
                multiplied.append(products.measure(shape, dtype, watch))
        multiply = products.multiplication(effort.beside, effort.beside, effort.beside, dtypes[0], device)
        product_seconds = watch.seconds(multiply)
        measured: list[Measured] = []
        for axes, hosts in groups:
            group = Runtime.of(mesh).group(axes)
            for kind in collectives.MESSAGES:
                progress.show(f"collectives of {group.size} ranks over {_count(hosts, 'host')}")
                measured.append(
                    collectives.measure(kind, group, hosts, effort.messages, watch, multiply, product_seconds)
                )
    flops = {dtype: max(p.flops for p in multiplied if p.dtype == dtype) for dtype in dtypes}
    hosts = world_size(sizes) // per_host
    return Cluster(
        version=VERSION,
        hosts=hosts,
        devices_per_host=per_host,
        device=Device(
            name=_name(device),
            memory=_memory(device, per_host),
            flops=flops,
            memory_bandwidth=bandwidth,
            overhead=overhead,
            products=multiplied,
        ),
        links=links(measured, hosts) if measured else None,
    )


def shapes(sizes: Mapping[str, int], per_host: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """(axes, hosts that a group spans) of every set of axes whose groups have another shape than those before.

    sizes: the mesh. A shape is (ranks, hosts); a group that spans more hosts elsewhere counts by the most.
    """
    seen: set[tuple[int, int]] = set()
    wide = [axis for axis, size in sizes.items() if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            groups = {ranks_along(rank, axes, sizes) for rank in range(world_size(sizes))}
            hosts = max(len({rank // per_host for rank in ranks}) for ranks in groups)
            shape = world_size({axis: sizes[axis] for axis in axes}), hosts
            if shape not in seen:
                seen.add(shape)
                yield axes, hosts


def every_size(hosts: int, per_host: int) -> dict[str, int]:
    """A mesh whose axes join to groups of every size that divides the hosts, or the ranks of one."""
    over_hosts = {f"hosts{i}": size for i, size in enumerate(_factors(hosts))}
    return (over_hosts | {f"devices{i}": size for i, size in enumerate(_factors(per_host))}) or {"devices": 1}


def summary(cluster: Cluster) -> str:
    """A few lines on what was found."""
    device = cluster.device
    machine = f"{_count(cluster.hosts, 'host')} of {_count(cluster.devices_per_host, 'device')}: {device.name}"
    rates = ", ".join(f"{dtype} {rate / 1e9:,.1f} GFLOP/s" for dtype, rate in (device.flops or {}).items())
    memory = f"memory {(device.memory_bandwidth or 0) / 1e9:.1f} GB/s · operator {device.overhead * 1e6:.1f} µs"
    lines = [machine, f"{rates} · {memory}"]
    for found in cluster.links.measured if cluster.links is not None else []:
        lines.append(
            f"{found.kind:14} {found.ranks:3} ranks, {_count(found.hosts, 'host'):7} "
            f"latency {found.latency * 1e6:9,.0f} µs, at least {found.least * 1e6:9,.0f}  "
            f"bandwidth {found.bandwidth / 1e6:9,.1f} MB/s  "
            f"beside products ×{found.contention:.2f}  residual {found.residual:.0%}"
        )
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# What is asked for


def _axes(mesh: str | None, place: Place) -> dict[str, int]:
    """The mesh asked for, or one with groups of every size."""
    if place.world % place.local_world:
        raise InputError(
            f"profile: found {place.world} ranks, {place.local_world} on this host; allowed: equally many on each host"
        )
    if mesh is None:
        return every_size(place.world // place.local_world, place.local_world)
    axes = parse_mesh(mesh)
    if world_size(axes) != place.world:
        raise InputError(
            f"--mesh: {mesh} needs {world_size(axes)} ranks, found {place.world}; "
            f"allowed: a mesh whose sizes multiply to {place.world}"
        )
    return axes


def _factors(number: int) -> list[int]:
    """Prime factors, smallest first."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def _check_dtypes(dtypes: Sequence[str]) -> None:
    for dtype in dtypes:
        if dtype not in PRODUCTS or dtypes.count(dtype) > 1:
            raise InputError(f"--dtype: found {dtype!r}; allowed: {', '.join(PRODUCTS)}, each once")


def _agreed_device(output: Path, place: Place, store: Store) -> torch.device:
    """Where all ranks measure: on GPUs if rank 0 has one for each rank of its host. It also checks ``output``."""
    if place.rank == 0:
        try:
            check_directory(output, "--output")
            store.set("shardwright/profile", "cuda" if torch.cuda.device_count() >= place.local_world else "cpu")
        except InputError as error:
            store.set("shardwright/profile", f"error: {error}")
    answer = store.get("shardwright/profile").decode()
    if answer.startswith("error: "):
        raise InputError(answer.removeprefix("error: "))
    if answer == "cuda":
        return torch.device("cuda", place.local)
    return torch.device("cpu")


# What the device and the links are


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine() or "CPU"


def _memory(device: torch.device, per_host: int) -> int:
    """Bytes of one device; of a host without any, each of its processes has an equal share."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    return kibibytes * 1024 // per_host


def links(measured: Sequence[Measured], hosts: int) -> Links:
    """One link of each kind, by the all-gather that loads it most purely: inside a host, and one rank of each host."""
    gathers = [found for found in measured if found.kind == "all_gather"]
    within = [found for found in gathers if found.hosts == 1]
    between = [found for found in gathers if found.hosts > 1]
    apart = _link(min(between, key=lambda found: found.ranks / found.hosts)) if between else None
    inside = _link(max(within, key=lambda found: found.ranks)) if within else apart
    assert inside is not None
    return Links(within_host=inside, between_hosts=apart if hosts > 1 else None, measured=list(measured))


def _link(found: Measured) -> Link:
    """The link under an all-gather: of what a rank sends, only what leaves its host (if any does) loads it."""
    share = 1.0
    if found.hosts > 1:
        share = (found.ranks - found.ranks / found.hosts) / (found.ranks - 1)
    return Link(latency=found.latency, bandwidth=found.bandwidth * share, least=found.least)
