"""What work takes on one mesh of a cluster, in seconds: products, other operators, collectives.

| work       | seconds                                                                                     |
|------------|---------------------------------------------------------------------------------------------|
| product    | overhead + max(2·m·n·k / rate, bytes / memory bandwidth)                                    |
| operator   | overhead + bytes / memory bandwidth (operators.py tells the bytes); a view takes none       |
| collective | of each message max(least, latency + bytes / bandwidth), within a host or between hosts,    |
|            | whichever bytes take longer                                                                 |

rate: of the measured products of that element type, weighted by nearness in (log m, log n, log k), at the edge of what
was measured beyond it; else flops · efficiency. Collectives that were measured over as many ranks and hosts go before
the links. Of the M bytes that a rank sends (a gather: (n−1)/n of the gathered size, whatever its own part), over n
ranks, the fewest on a host being l:

| how it travels                                     | within a host   | between hosts         |
|----------------------------------------------------|-----------------|-----------------------|
| nccl: all_gather, reduce_scatter, all_reduce       | M (0 if l = 1)  | M·(n−l)/(n−1)/l       |
| sends to every other rank: nccl's all_to_all, gloo | M·(l−1)/(n−1)   | M·(n−l)/(n−1)         |
| nccl: mode ring, broadcast                         | M (0 if l = 1)  | M (0 in one host)     |
| gloo: mode ring, all_reduce, broadcast             | M (0 if l = 1)  | M/l' (0 in one host)  |

nccl's first line is its rings, one through each of a host's l devices and its own network card: each card carries a
1/l of what leaves the host. On gloo the ranks of a host share one card. A ring crosses it once for the l' ranks of the
host (l' the most on one), so the rank at the border has the shares of all. Latency and least are those of a tree:
⌈log₂ hosts⌉ hops between hosts, ⌈log₂ l'⌉ within; an all_reduce goes up and down, a ring's message is one hop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwright.errors import InputError
from shardwright.simulate.operators import Shape, Work, work_of
from shardwright.spec.cluster import Cluster, Link, Links, Measured
from shardwright.spec.collectives import AROUND, COLLECTIVES, DIRECT
from shardwright.spec.dtypes import FLOATS
from shardwright.spec.mesh import world_size

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Spread:
    """How a group lies over hosts: its ranks, the hosts it spans, the fewest and the most of it on one host.

    Of all groups along the same axes the worst: the most hosts, then the fewest on one.
    """

    ranks: int
    hosts: int
    fewest: int
    most: int


@dataclass(frozen=True)
class Machine:
    """What work takes on one mesh of a cluster.

    mesh: axes in mesh order, the last fastest; rank r sits on host r // devices_per_host. dtype: element type of
    activations. stored: that of parameters and moments, by default the same. Raises InputError, one line, where the
    mesh has more ranks than the cluster, and later where the cluster file lacks what a question needs.
    """

    cluster: Cluster
    mesh: Mapping[str, int]
    dtype: str
    backend: str
    stored: str | None = None
    _operators: dict[tuple[str, tuple[Shape, ...]], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _spreads: dict[tuple[str, ...], Spread] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InputError(f"backend: found {self.backend!r}; allowed: {', '.join(BACKENDS)}")
        for name, dtype in (("dtype", self.dtype), ("stored", self.stored)):
            if dtype is not None and dtype not in FLOATS:
                raise InputError(f"{name}: found {dtype!r}; allowed: {', '.join(FLOATS)}")
        if world_size(self.mesh) > self.cluster.devices:
            raise InputError(
                f"mesh: found {world_size(self.mesh)} ranks; allowed: up to the {self.cluster.devices} devices of the "
                "cluster"
            )

    # -- compute ------------------------------------------------------------------------------------------------------

    def product(self, m: int, n: int, k: int) -> float:
        """Seconds of one product Y[m,n] = X[m,k] · W[n,k]ᵀ."""
        return self._seconds(Work(m * k + n * k + m * n, (m, n, k)))

    def operator(self, name: str, shapes: tuple[Shape, ...]) -> float:
        """Seconds of an operator of a trace (its name and the shapes of its tensors, as trace.Op has them)."""
        key = (name, shapes)
        if key not in self._operators:
            work = work_of(name, shapes)
            self._operators[key] = 0.0 if work is None else self._seconds(work)
        return self._operators[key]

    def _seconds(self, work: Work) -> float:
        device = self.cluster.device
        itemsize = FLOATS[(self.stored or self.dtype) if work.optimizer else self.dtype]
        moving = work.elements * itemsize / device.memory_bandwidth if device.memory_bandwidth else 0.0
        computing = 0.0
        if work.product is not None and 0 not in work.product:
            computing = 2 * math.prod(work.product) * work.times / self._rate(*work.product)
        return device.overhead + max(computing, moving)

    @cached_property
    def _measured_rates(self) -> list[tuple[tuple[float, float, float], float]]:
        """((log m, log n, log k), log of floating-point operations per second) of what was measured in ``dtype``."""
        return [
            ((math.log(product.m), math.log(product.n), math.log(product.k)), math.log(product.flops))
            for product in self.cluster.device.products
            if product.dtype == self.dtype
        ]

    def _rate(self, m: int, n: int, k: int) -> float:
        """Floating-point operations per second of a product."""
        device, measured = self.cluster.device, self._measured_rates
        if not measured:
            if self.dtype not in (device.flops or {}):
                found = ", ".join(device.flops or {}) or "null"
                raise InputError(f"device.flops: found {found}; allowed: {self.dtype} among them, or products of it")
            assert device.flops is not None
            return device.flops[self.dtype] * device.efficiency
        bounds = [(min(column), max(column)) for column in zip(*(place for place, _ in measured), strict=True)]
        here = [min(max(math.log(size), low), high) for size, (low, high) in zip((m, n, k), bounds, strict=True)]
        distances = [sum((a - b) ** 2 for a, b in zip(here, place, strict=True)) for place, _ in measured]
        if min(distances) == 0:
            there = [rate for distance, (_, rate) in zip(distances, measured, strict=True) if distance == 0]
            return math.exp(sum(there) / len(there))
        weights = [distance**-2 for distance in distances]
        logs = sum(weight * rate for weight, (_, rate) in zip(weights, measured, strict=True))
        return math.exp(logs / sum(weights))

    # -- communication ------------------------------------------------------------------------------------------------

    def collective(self, kind: str, axes: tuple[str, ...], size: int, sent: int, messages: int = 1) -> float:
        """Seconds of one collective, alone, over the group of all ``axes`` together.

        size: bytes of the full tensor; sent: bytes that this rank sends, as trace.Collective has them. messages: how
        many, one after the other, the bytes are cut into.
        """
        spread = self.spread(axes)
        if spread.ranks == 1:
            return 0.0
        moved = COLLECTIVES[kind].moved(spread.ranks, size, sent)
        measured = self._measured(kind, spread)
        if measured is not None:
            return max(messages * measured.least, messages * measured.latency + moved / measured.bandwidth)
        trips = COLLECTIVES[kind].trips
        least = self._over_tree(spread, lambda link: link.least)
        travel = self._travel(moved, spread, *self._shares(kind, spread))
        return max(messages * trips * least, messages * trips * self.latency(axes) + travel)

    def ring(self, kind: str, axes: tuple[str, ...], size: int, sent: int, messages: int) -> float:
        """Seconds of a collective whose pieces go round a ring of the group, from each rank to the next, alone."""
        spread = self.spread(axes)
        if spread.ranks == 1:
            return 0.0
        moved = COLLECTIVES[kind].moved(spread.ranks, size, sent)
        slowest = self._between() if spread.hosts > 1 else self._links.within_host
        travel = self._travel(moved, spread, *self._around(spread))
        return max(messages * slowest.least, messages * slowest.latency + travel)

    def latency(self, axes: Iterable[str]) -> float:
        """Seconds that a message without bytes takes to reach every rank of the group over ``axes``."""
        return self._over_tree(self.spread(tuple(axes)), lambda link: link.latency)

    def _over_tree(self, spread: Spread, seconds: Callable[[Link], float]) -> float:
        """What each hop of a tree over the group takes of its link, together."""
        within = _hops(spread.most) * seconds(self._links.within_host)
        return within + (_hops(spread.hosts) * seconds(self._between()) if spread.hosts > 1 else 0.0)

    def contention(self, kind: str, axes: tuple[str, ...]) -> float:
        """How many times as long a collective takes while a product runs: 1 where that was not measured."""
        measured = self._measured(kind, self.spread(axes))
        return measured.contention if measured is not None else 1.0

    def link(self, axes: tuple[str, ...]) -> str:
        """The kind of link that a collective over ``axes`` loads most: ``within a host`` or ``between hosts``."""
        return "between hosts" if self.spread(axes).hosts > 1 else "within a host"

    def spread(self, axes: tuple[str, ...]) -> Spread:
        """How the groups along ``axes`` lie over the hosts."""
        if axes not in self._spreads:
            self._spreads[axes] = self._spread(axes)
        return self._spreads[axes]

    def _spread(self, axes: tuple[str, ...]) -> Spread:
        unknown = [axis for axis in axes if axis not in self.mesh]
        if unknown:
            raise InputError(f"axes: found {unknown[0]!r}; allowed: the mesh's axes ({', '.join(self.mesh)})")
        members = self._ranks_along(axes)
        firsts = self._ranks_along([axis for axis in self.mesh if axis not in axes])
        per_host = self.cluster.devices_per_host
        found = set[Spread]()
        for first in np.unique(firsts % per_host):  # whole hosts further on, a group lies alike
            counts = np.unique((members + first) // per_host, return_counts=True)[1]
            found.add(Spread(len(members), len(counts), int(counts.min()), int(counts.max())))
        return max(found, key=lambda spread: (spread.hosts, -spread.fewest, spread.most))

    def _ranks_along(self, axes: Collection[str]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Rank 0's group over ``axes`` (mesh.ranks_along), as an array: a mesh may have many thousand ranks."""
        found, stride = np.zeros(1, dtype=np.int64), 1
        for axis, size in reversed(list(self.mesh.items())):
            if axis in axes:
                found = (found + stride * np.arange(size)[:, None]).reshape(-1)
            stride *= size
        return found

    @property
    def _links(self) -> Links:
        if self.cluster.links is None:
            raise InputError("links: found null; allowed: the cluster's links, where times are asked for")
        return self.cluster.links

    def _between(self) -> Link:
        link = self._links.between_hosts
        if link is None:
            raise InputError("links.between_hosts: found null; allowed: a link, where a group spans hosts")
        return link

    def _measured(self, kind: str, spread: Spread) -> Measured | None:
        for entry in self._links.measured:
            if (entry.kind, entry.ranks, entry.hosts) == (kind, spread.ranks, spread.hosts):
                return entry
        return None

    def _shares(self, kind: str, spread: Spread) -> tuple[float, float]:
        """Of the bytes that a rank sends: the share that uses its link within the host, and that between hosts."""
        n, here = spread.ranks, spread.fewest
        away = (n - here) / (n - 1)
        way = COLLECTIVES[kind].ways[self.backend]
        if way == AROUND:
            return self._around(spread)
        if way == DIRECT:
            return (here - 1) / (n - 1), away
        return float(here > 1), away / here

    def _around(self, spread: Spread) -> tuple[float, float]:
        """A ring leaves a host once; where its ranks share a card (gloo), that rank has the shares of all."""
        between = 1 / spread.most if self.backend == "gloo" else 1.0
        return float(spread.fewest > 1 or spread.hosts == 1), between if spread.hosts > 1 else 0.0

    def _travel(self, moved: int, spread: Spread, within: float, between: float) -> float:
        """Seconds for ``moved`` bytes, these shares of it on either link, both at once."""
        seconds = within * moved / self._links.within_host.bandwidth
        return max(seconds, between * moved / self._between().bandwidth) if spread.hosts > 1 else seconds


def _hops(ends: int) -> int:
    return math.ceil(math.log2(ends))
