"""The profile: fits find the line under measurements of which some are wrong; what is measured makes a whole file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.profile import collectives, products, profile
from shardwright.profile.fits import NO_LIMIT, fit
from shardwright.profile.profile import Effort
from shardwright.profile.stopwatch import Stopwatch
from shardwright.spec.cluster import Cluster, Link, Measured
from support import dense
from support.ranks import on_ranks
from test_cli import refused

TINY = Effort(messages=(2**10, 2**14, 2**18), sizes=(16, 64), limit=64**3, beside=64, repetitions=1, least=1e-3)
SIZES = [2**power for power in range(10, 24)]


# Fits


@settings(max_examples=200, deadline=None)
@given(
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e7, 1e11),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=len(SIZES), max_size=len(SIZES)),
    slowed=st.dictionaries(st.integers(0, len(SIZES) - 1), st.floats(2, 30), max_size=2),
)
def test_a_fit_finds_the_line_whatever_slowed_some_measurements(latency, bandwidth, noise, slowed):
    true = [latency + size / bandwidth for size in SIZES]
    seconds = [t * (1 + e) * slowed.get(i, 1) for i, (t, e) in enumerate(zip(true, noise, strict=True))]
    line = fit(SIZES, seconds)
    # Where both of the largest are wrong, little is left that tells the bandwidth.
    for place, (size, expected) in enumerate(zip(SIZES, true, strict=True)):
        if place not in slowed:
            assert line.seconds(size) == pytest.approx(expected, rel=0.1 if len(slowed) < 2 else 0.35)
    assert line.residual <= 0.05


@settings(max_examples=100, deadline=None)
@given(latency=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e9), slowed=st.integers(0, len(SIZES) - 1))
def test_a_fit_is_exact_where_one_measurement_is_wrong(latency, bandwidth, slowed):
    seconds = [(latency + size / bandwidth) * (10 if i == slowed else 1) for i, size in enumerate(SIZES)]
    line = fit(SIZES, seconds)
    assert line.latency == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert line.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert line.residual < 1e-6


def test_a_fit_sees_a_slow_link_behind_a_buffer():
    """Until 256 KiB are sent the link seems to have no limit."""
    sizes = Effort.of("cpu", quick=True).messages
    line = fit(sizes, [4e-3 + max(0, size - 2**18) / 125e6 for size in sizes])
    assert line.seconds(2**22) == pytest.approx(4e-3 + 2**22 / 125e6, rel=0.25)


@settings(max_examples=100, deadline=None)
@given(
    latency=st.sampled_from([0.0, 1e-4]),
    bandwidth=st.floats(1e7, 1e9),
    flat=st.integers(1, 6),
    slowed=st.integers(0, len(SIZES) - 1),
)
def test_a_fit_finds_what_any_message_takes(latency, bandwidth, flat, slowed):
    """Up to a size all take as long: what it costs to begin does not come on top of the bytes."""
    least = latency + SIZES[flat] / bandwidth
    true = [max(least, latency + size / bandwidth) for size in SIZES]
    line = fit(SIZES, [t * (10 if i == slowed else 1) for i, t in enumerate(true)])
    assert [line.seconds(size) for size in SIZES] == pytest.approx(true, rel=1e-6)


def test_a_fit_tells_nothing_that_a_line_does_not_need():
    assert fit(SIZES, [1e-3 + size / 1e9 for size in SIZES]).least == 0


def test_a_fit_stays_within_what_can_be():
    assert fit([1000], [2.0]).seconds(1000) == pytest.approx(2.0)
    assert fit([10, 100, 1000], [1.0, 1.0, 1.0]).bandwidth == NO_LIMIT  # no growth
    shrinking = fit([10, 100, 1000], [3.0, 2.0, 1.0])
    assert shrinking.latency >= 0 and shrinking.bandwidth > 0
    steep = fit([10, 100], [1e-6, 1.0])  # a line through both would start below 0
    assert steep.latency >= 0


# What is measured


def test_links_are_what_gathers_say_of_them():
    def found(ranks, hosts, **fields):
        return Measured(kind="all_gather", ranks=ranks, hosts=hosts, **fields)

    inside = found(2, 1, latency=1e-6, bandwidth=1e9, least=4e-6)
    apart = found(4, 2, latency=1e-3, bandwidth=3e6, least=2e-3)
    links = profile.links([inside, apart], hosts=2)
    assert links.within_host == Link(latency=1e-6, bandwidth=1e9, least=4e-6)
    assert links.between_hosts == Link(latency=1e-3, bandwidth=2e6, least=2e-3)  # two of three go to the other host


def test_every_shape_of_group_is_measured_once():
    def found(sizes, per_host):
        return list(profile.shapes(sizes, per_host))

    assert found({"data": 2, "tensor": 2}, 4) == [(("data",), 1), (("data", "tensor"), 1)]
    assert found({"data": 2, "tensor": 2}, 2) == [(("data",), 2), (("tensor",), 1), (("data", "tensor"), 2)]
    assert found({"data": 4}, 2) == [(("data",), 2)]
    assert found({"data": 1}, 1) == []
    assert found({"a": 2, "b": 1, "c": 3}, 3) == [(("a",), 2), (("c",), 1), (("a", "c"), 2)]
    assert found({"a": 3, "b": 2}, 3) == [(("a",), 2), (("b",), 2), (("a", "b"), 2)]  # {2, 3} of b spans both hosts
    assert profile.every_size(2, 12) == {"hosts0": 2, "devices0": 2, "devices1": 2, "devices2": 3}
    assert profile.every_size(1, 1) == {"devices": 1}


def messages():
    """Of each kind: (asked for, told, logged) bytes that this rank sends."""
    from shardwright.runtime.runtime import Runtime
    from shardwright.trace import record

    n = dist.get_world_size()
    group = Runtime.of(dense.mesh_of(tensor=n)).group(("tensor",))
    found = {}
    for kind, make in collectives.MESSAGES.items():
        for size in (2**10, 2**16):
            message = make(group, size, lambda *shape: torch.zeros(shape))
            with record() as trace:
                message.run()
            found[kind, size] = message.sent, [(event.kind, event.sent) for event in trace.collectives]
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_messages_send_what_the_trace_says(n):
    for found in on_ranks(n, messages):
        for (kind, size), (sent, logged) in found.items():
            assert logged == [(kind, sent)]
            assert 0.7 * size <= sent <= size


def measured(axes, per_host, path):
    cluster = profile.measure(dense.mesh_of(**axes), per_host, ["float32", "bfloat16"], TINY, torch.device("cpu"))
    if dist.get_rank() == 0:
        cluster.save(path)
    return cluster.model_dump()


@pytest.mark.parametrize(
    ("axes", "per_host", "groups"),
    [
        ({"data": 2}, 2, [(2, 1)]),
        ({"data": 2, "tensor": 2}, 2, [(2, 2), (2, 1), (4, 2)]),
    ],
)
def test_a_profile_is_whole_and_the_same_everywhere(axes, per_host, groups, tmp_path):
    path = tmp_path / "cluster.yaml"
    found = on_ranks(torch.Size(axes.values()).numel(), measured, axes, per_host, path)
    assert all(other == found[0] for other in found)
    cluster = Cluster.load(path)
    assert cluster.model_dump() == found[0]
    world = torch.Size(axes.values()).numel()
    assert (cluster.hosts, cluster.devices_per_host) == (world // per_host, per_host)
    device, links = cluster.device, cluster.links
    assert device.name and 2**20 < device.memory < 2**50
    assert 0 < device.overhead < 1e-2 and device.memory_bandwidth > 1e6
    for dtype in ("float32", "bfloat16"):
        rates = {(p.m, p.n, p.k): p.flops for p in device.products if p.dtype == dtype}
        assert len(rates) == 8 and max(rates.values()) == device.flops[dtype]
    assert {(m.kind, m.ranks, m.hosts) for m in links.measured} == {
        (kind, *group) for group in groups for kind in collectives.MESSAGES
    }
    assert all(m.contention >= 1 and m.bandwidth > 0 for m in links.measured)
    assert (links.between_hosts is None) == (cluster.hosts == 1)
    gathers = {(m.ranks, m.hosts): m for m in links.measured if m.kind == "all_gather"}
    assert links.within_host.bandwidth == gathers[2, 1].bandwidth
    if cluster.hosts == 2:
        assert links.between_hosts.bandwidth == gathers[2, 2].bandwidth


def slowest():
    """Rank r takes r hundredths of a second."""
    import time

    return Stopwatch(torch.device("cpu"), 3).seconds(lambda: time.sleep(0.02 * dist.get_rank()))


def test_the_slowest_rank_counts_and_all_are_told():
    first, second = on_ranks(2, slowest)
    assert first == second and 0.02 <= first < 0.2


def behind_slow_barriers():
    import time

    barrier = dist.barrier

    def late() -> None:
        barrier()
        time.sleep(0.1)

    dist.barrier = late
    try:
        return Stopwatch(torch.device("cpu"), 3).seconds(lambda: time.sleep(0.005))
    finally:
        dist.barrier = barrier


def test_a_barrier_is_not_part_of_what_is_timed():
    first, second = on_ranks(2, behind_slow_barriers)
    assert first == second and 0.005 <= first < 0.02


def test_products_are_those_of_the_grid_within_the_limit():
    assert list(products.shapes((2, 4), 16)) == [(2, 2, 2), (2, 2, 4), (2, 4, 2), (4, 2, 2)]
    x = products.multiplication(3, 5, 7, "bfloat16", torch.device("cpu"))()
    assert x.shape == (3, 5) and x.dtype == torch.bfloat16


# The command


def test_profile_without_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert "torch.distributed.run --nproc-per-node N -m shardwright profile" in refused(
        "profile", "-o", tmp_path / "cluster.yaml"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--mesh", "data=3"), "--mesh: data=3 needs 3 ranks, found 1"),
        (("--mesh", "data"), "mesh: found 'data'"),
        (("--dtype", "int3"), "--dtype: found 'int3'"),
        (("-o", "nowhere/cluster.yaml"), "--output: found nowhere/cluster.yaml"),
    ],
)
def test_profile_refuses_bad_input(given, words, tmp_path, one_rank):
    output = () if "-o" in given else ("-o", tmp_path / "cluster.yaml")
    assert words in refused("profile", *given, *output)
    assert not (tmp_path / "cluster.yaml").exists()


def test_profile_of_one_rank_writes_a_cluster_without_links(tmp_path, one_rank):
    path = tmp_path / "cluster.yaml"
    less = "profile.Effort.of = lambda *_: profile.Effort((2**10,), (16,), 2**20, 16, 1, 1e-3)"
    program = f"from shardwright.cli import app; from shardwright.profile import profile; {less}; app()"
    command = [sys.executable, "-c", program, "profile", "--dtype", "bf16", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["measuring operators", "measuring memory", "measuring products in bfloat16"]
    cluster = Cluster.load(path)
    assert cluster.devices == 1 and cluster.links is None and set(cluster.device.flops) == {"bfloat16"}
