"""One file and one line of a table: an overlap mode and a collective that the package lacks, used and removed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import shardwright as sw
from shardwright.comm.collectives import all_reduce
from shardwright.comm.exchange import log, part_of_one
from shardwright.runtime.runtime import Runtime
from shardwright.simulate.machine import Machine
from shardwright.spec.cluster import Cluster, Measured
from shardwright.spec.collectives import AROUND, COLLECTIVES, CollectiveKind
from shardwright.spec.layout import OVERLAP_MODES, OverlapMode
from shardwright.trace import Collective
from support import counted_mode, dense
from support.ranks import on_ranks


@contextmanager
def registered(table, name, entry):
    """The line of the table, while the body runs."""
    assert name not in table
    table[name] = entry
    try:
        yield
    finally:
        del table[name]


# -- an overlap mode ---------------------------------------------------------------------------------------------------


def multiplied_by(overlap: str):
    """(Y, dX, dW) of a column site on this rank, and how often the tests' mode was asked."""
    counted_mode.CALLS.update(forward=0, backward=0)
    mesh = dense.mesh_of(tensor=2)
    linear = torch.nn.Linear(8, 6, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(dense.random(6, 8, seed=1))
    lin = sw.GridLinear.siblings([linear], sw.GridLayout(n="tensor", overlap=overlap), mesh)[0]
    x = dense.part(dense.random(10, 8, seed=2), mesh, lin.input_placements).requires_grad_()
    y = lin(x)
    y.square().sum().backward()
    return y.detach(), x.grad, lin.weight.grad.to_local(), dict(counted_mode.CALLS)


def multiplied_by_both():
    with registered(OVERLAP_MODES, "counted", OverlapMode("support.counted_mode", overlaps=False)):
        of_the_mode = multiplied_by("counted")
    return of_the_mode, multiplied_by("blocking")


def test_an_overlap_mode_is_one_file_and_one_line():
    for (*found, calls), (*blocking, others) in on_ranks(2, multiplied_by_both):
        assert (calls, others) == ({"forward": 1, "backward": 1}, {"forward": 0, "backward": 0})
        assert all(torch.equal(a, b) for a, b in zip(found, blocking, strict=True))
    with pytest.raises(sw.InputError, match=r"layout\.overlap: found 'counted'; allowed: blocking, async, ring$"):
        sw.GridLayout(overlap="counted")


# -- a collective ------------------------------------------------------------------------------------------------------

KIND = CollectiveKind(lambda n, whole, own: 3 * own, {"gloo": AROUND, "nccl": AROUND}, trips=3)


def summed_thrice():
    """The collective "thrice" on this rank: a file of it would be these lines. (Events, bytes it was of.)"""
    mesh = dense.mesh_of(tensor=2)
    group = Runtime.of(mesh).group(("tensor",))
    x = torch.ones(4, dtype=torch.float64)
    with registered(COLLECTIVES, "thrice", KIND), sw.record() as trace:
        log("thrice", group, x.nbytes, x.nbytes, "m", "blocking")
        with part_of_one(group):
            for _ in range(3):
                all_reduce(x, group)
    return [event for event in trace.events if isinstance(event, Collective)], x.tolist()


def test_a_collective_is_one_file_and_one_line():
    cluster = Cluster.named("2xH100-80GB")
    for events, values in on_ranks(2, summed_thrice):
        assert values == [8.0] * 4
        assert [(event.kind, event.size, event.sent) for event in events] == [("thrice", 32, 96)]
        with registered(COLLECTIVES, "thrice", KIND):
            machine = Machine(cluster, {"tensor": 2}, "float32", "nccl")
            link = cluster.links.within_host
            seconds = machine.collective(events[0].kind, events[0].axes, events[0].size, events[0].sent)
            assert seconds == max(3 * link.least, 3 * link.latency + 96 / link.bandwidth)
            assert Measured(kind="thrice", ranks=2, hosts=1, latency=0.0, bandwidth=1.0).kind == "thrice"
    with pytest.raises(ValueError, match="thrice"):
        Measured(kind="thrice", ranks=2, hosts=1, latency=0.0, bandwidth=1.0)
