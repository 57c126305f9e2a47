"""What products, operators and collectives take (ACCEPTANCE E5): every figure by hand, in powers of two."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.simulate.machine import Machine, Spread
from shardwright.spec.cluster import SHIPPED, Cluster, Device, Link, Links, Measured, Product
from shardwright.spec.collectives import COLLECTIVES
from shardwright.spec.mesh import ranks_along, world_size

WITHIN = Link(latency=2**-10, bandwidth=2**20)
BETWEEN = Link(latency=2**-8, bandwidth=2**18)


def cluster(hosts=2, each=2, measured=(), within=WITHIN, between=BETWEEN, links=True, **device):
    fields = {"flops": {"float32": 2**20}, "efficiency": 0.5, "memory_bandwidth": 2**20, "overhead": 2**-10, **device}
    return Cluster(
        version=2,
        hosts=hosts,
        devices_per_host=each,
        device=Device(name="device", memory=2**30, **fields),
        links=Links(within_host=within, between_hosts=between, measured=list(measured)) if links else None,
    )


def machine(mesh=None, backend="gloo", dtype="float32", stored=None, **fields):
    return Machine(cluster(**fields), mesh or {"a": 2, "b": 2}, dtype, backend, stored)


# -- products and other operators -------------------------------------------------------------------------------------


def test_a_product_takes_its_operations_or_its_bytes():
    assert machine().product(8, 16, 32) == 2**-10 + 2 * 8 * 16 * 32 / 2**19
    thin = 4 * (64 + 64 * 64 + 64) / 2**20
    assert thin > 2 * 64 * 64 / 2**19
    assert machine().product(1, 64, 64) == 2**-10 + thin
    assert machine(memory_bandwidth=None).product(1, 64, 64) == 2**-10 + 2 * 64 * 64 / 2**19


def products(*rates):
    return [Product(dtype="float32", m=m, n=n, k=k, flops=flops) for m, n, k, flops in rates]


def test_measured_products_go_first():
    measured = products((8, 16, 32, 2.0**16), (64, 64, 64, 2.0**18))
    slow = machine(products=measured, memory_bandwidth=None, overhead=0)
    assert slow.product(8, 16, 32) == pytest.approx(8192 / 2**16, rel=1e-12)
    assert slow.product(64, 64, 64) == pytest.approx(2 * 64**3 / 2**18, rel=1e-12)
    assert slow.product(640, 640, 640) == pytest.approx(2 * 640**3 / 2**18, rel=1e-12)  # flat beyond the measured
    assert slow.product(1, 1, 1) == pytest.approx(2 / 2**16, rel=1e-12)
    middle = 2 * 8 * 16 * 32 / slow.product(8, 16, 32)
    for m in (16, 32, 64):  # rates lie between the measured ones, and rise towards the higher
        rate = 2 * m * 64 * 64 / slow.product(m, 64, 64)
        assert middle < rate <= 2**18 * (1 + 1e-12)
        middle = rate
    other = machine(products=[*measured, Product(dtype="float64", m=8, n=16, k=32, flops=1.0)])
    assert other.product(8, 16, 32) < 1


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(sw.InputError, match=r"device\.flops: found float32; allowed: bfloat16 among them"):
        machine(dtype="bfloat16").product(1, 1, 1)
    with pytest.raises(sw.InputError, match=r"device\.flops: found null"):
        machine(flops=None).product(1, 1, 1)
    with pytest.raises(sw.InputError, match="dtype: found 'int3'"):
        machine(dtype="int3")
    with pytest.raises(sw.InputError, match="stored: found 'int3'"):
        machine(stored="int3")
    with pytest.raises(sw.InputError, match="backend: found 'mpi'; allowed: gloo, nccl"):
        machine(backend="mpi")
    with pytest.raises(sw.InputError, match="mesh: found 8 ranks; allowed: up to the 4 devices"):
        machine(mesh={"a": 8})


OPERATORS = [  # name, shapes, elements through memory (None: no time)
    ("aten.view.default", ((4, 8),), None),
    ("aten.detach.default", ((4, 8),), None),
    ("aten.empty.memory_format", (), None),
    ("c10d.send.default", ((4, 8),), None),
    ("aten.mul.Tensor", ((4, 8), (4, 8)), 96),
    ("aten.mul.Tensor", ((1, 4, 8), (8,)), 32 + 8 + 32),
    ("aten.add_.Tensor", ((4, 8), (4, 8)), 96),
    ("aten.silu.default", ((4, 8),), 64),
    ("aten.silu_backward.default", ((4, 8), (4, 8)), 96),
    ("aten.copy_.default", ((4, 8), (4, 8)), 64),
    ("aten.zero_.default", ((4, 8),), 32),
    ("aten.sum.dim_IntList", ((4, 8),), 32),
    ("aten.cat.default", ((4, 8), (4, 8)), 128),
    ("aten.logsumexp.out", ((4, 8), (4,)), 36),
    ("aten.embedding.default", ((100, 8), (4,)), 4 + 2 * 4 * 8),
    ("aten.index_select.out", ((100, 8), (4,), (4, 8)), 2 * (4 + 32)),
    ("aten._fused_adamw_.default", ((4, 8),) * 4, 7 * 32),
]


@pytest.mark.parametrize(("name", "shapes", "elements"), OPERATORS)
def test_an_operator_takes_its_bytes(name, shapes, elements):
    seconds = machine().operator(name, shapes)
    assert seconds == (0 if elements is None else 2**-10 + 4 * elements / 2**20)


def test_the_optimizer_moves_what_is_stored():
    wide = machine(dtype="bfloat16", stored="float32", flops={"bfloat16": 1.0}, overhead=0)
    assert wide.operator("aten._fused_adamw_.default", ((4, 8),) * 4) == 4 * 7 * 32 / 2**20
    assert wide.operator("aten.silu.default", ((4, 8),)) == 2 * 64 / 2**20


def test_products_by_name():
    here, expected = machine(), machine().product(8, 16, 32)
    assert here.operator("aten.mm.default", ((8, 32), (32, 16))) == expected
    assert here.operator("aten.mm.out", ((8, 32), (32, 16), (8, 16))) == expected
    assert here.operator("aten.addmm.default", ((16,), (8, 32), (32, 16))) == expected
    assert here.operator("aten.addmm_.default", ((8, 16), (8, 32), (32, 16))) == expected
    assert here.operator("aten.bmm.default", ((2, 8, 32), (2, 32, 16))) == 2**-10 + 2 * expected_flops(8, 16, 32)


def expected_flops(m, n, k):
    return 2 * m * n * k / 2**19


def test_attention_is_two_products_and_five_in_backward():
    """q [b,h,s,d] = [2,4,64,32]: scores and their product with v are 2·2·4·64·64·32 operations, causal: half."""
    here = machine(overhead=0)
    q, lse, one = (2, 4, 64, 32), (2, 4, 64), 2 * 2 * 4 * 64 * 64 * 32 / 2**19
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert here.operator(f"{name}.default", (q, q, q)) == one
    assert here.operator(f"{name}_backward.default", (q, q, q, q, q, lse)) == 2.5 * one
    shared, keys = (2, 2, 64, 32), (2, 4, 128, 32)
    assert here.operator(f"{name}.default", (q, shared, shared)) == one
    assert here.operator(f"{name}.default", (q, keys, keys)) == 4 * one  # twice the keys, and none known to be hidden
    assert here.operator(f"{name}_backward.default", (q, q, keys, keys, q, lse)) == 10 * one


# -- collectives ------------------------------------------------------------------------------------------------------

ONE, FAR = 2**-10, 2**-8
"""Latency of a hop within and between hosts."""


def test_how_groups_lie_over_hosts():
    here = machine(mesh={"p": 2, "a": 2, "b": 4}, hosts=4, each=4)
    assert here.spread(("b",)) == Spread(4, 1, 4, 4)
    assert here.spread(("a",)) == Spread(2, 2, 1, 1)
    assert here.spread(("a", "b")) == Spread(8, 2, 4, 4)
    assert here.spread(("p", "b")) == Spread(8, 2, 4, 4)
    odd = machine(mesh={"a": 2, "b": 3}, hosts=3, each=2)  # hosts 01 23 45, groups 012 345: the worst of each
    assert odd.spread(("b",)) == Spread(3, 2, 1, 2)
    uneven = machine(mesh={"a": 3, "b": 4}, hosts=4, each=3)  # groups 3+1, 2+2, 1+3
    assert uneven.spread(("b",)) == Spread(4, 2, 1, 3)
    with pytest.raises(sw.InputError, match="axes: found 'c'"):
        odd.spread(("c",))


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 7), st.data())
def test_a_spread_is_the_worst_of_all_groups(sizes, each, data):
    mesh = {f"x{index}": size for index, size in enumerate(sizes)}
    axes = tuple(data.draw(st.lists(st.sampled_from(list(mesh)), unique=True)))
    here = machine(mesh=mesh, hosts=256, each=each)
    hosts = []
    for rank in range(world_size(mesh)):
        places = [member // each for member in ranks_along(rank, axes, mesh)]
        counts = [places.count(place) for place in set(places)]
        hosts.append((len(counts), -min(counts), max(counts)))
    assert max(hosts) == (lambda spread: (spread.hosts, -spread.fewest, spread.most))(here.spread(axes))


BY_HAND = [  # backend, kind, axes, size, sent, seconds by hand
    ("gloo", "all_gather", ("b",), 2048, 1024, ONE + 1024 / 2**20),
    ("gloo", "all_gather", ("a",), 2048, 1024, FAR + 1024 / 2**18),
    ("gloo", "all_gather", ("a", "b"), 4096, 3072, ONE + FAR + 2048 / 2**18),  # two of three peers are elsewhere
    ("gloo", "reduce_scatter", ("b", "a"), 4096, 3072, ONE + FAR + 2048 / 2**18),
    ("gloo", "all_to_all", ("a", "b"), 4096, 3072, ONE + FAR + 2048 / 2**18),
    ("gloo", "all_reduce", ("b",), 1024, 1024, 2 * ONE + 1024 / 2**20),
    (
        "gloo",
        "all_reduce",
        ("a", "b"),
        2048,
        3072,
        2 * (ONE + FAR) + 1536 / 2**18,
    ),  # a ring: its border sends all, on two shares
    ("nccl", "all_gather", ("b",), 2048, 1024, ONE + 1024 / 2**20),
    ("nccl", "all_gather", ("a", "b"), 4096, 3072, ONE + FAR + 1024 / 2**18),  # (h-1)/h · F over two cards
    ("nccl", "all_reduce", ("a", "b"), 4096, 6144, 2 * (ONE + FAR) + 2048 / 2**18),
    ("nccl", "all_to_all", ("a", "b"), 4096, 3072, ONE + FAR + 2048 / 2**18),
    ("nccl", "broadcast", ("b",), 4096, 0, ONE + 4096 / 2**20),
]


@pytest.mark.parametrize(("backend", "kind", "axes", "size", "sent", "seconds"), BY_HAND)
def test_a_collective_by_hand(backend, kind, axes, size, sent, seconds):
    assert machine(backend=backend).collective(kind, axes, size, sent) == pytest.approx(seconds, rel=1e-15)


def test_the_link_within_a_host_can_be_the_slower_one():
    between = Link(latency=0, bandwidth=2**40)
    fast = machine(backend="nccl", between=between)
    assert fast.collective("all_gather", ("a", "b"), 4096, 3072) == ONE + 3072 / 2**20
    assert machine(between=between).collective("all_gather", ("a", "b"), 4096, 3072) == ONE + 1024 / 2**20
    for takes in (fast.collective, fast.ring):  # between two hosts with one member each, the other link carries nothing
        assert takes("all_gather", ("a",), 2048, 1024, 1) == 1024 / 2**40


def test_a_ring_sends_everything_over_the_slowest_link_a_hop_a_message():
    for backend in ("gloo", "nccl"):
        here = machine(backend=backend)
        assert here.ring("all_gather", ("b",), 2048, 1024, 2) == 2 * ONE + 1024 / 2**20
        share = 2 if backend == "gloo" else 1  # two ranks of a host share its card
        assert here.ring("reduce_scatter", ("a", "b"), 4096, 3072, 3) == 3 * FAR + 3072 / share / 2**18


def test_messages_pay_a_latency_each():
    here = machine()
    assert here.collective("all_gather", ("b",), 2048, 1024, messages=3) == 3 * ONE + 1024 / 2**20
    assert here.latency(("b",)) == ONE and here.latency(("a",)) == FAR
    assert machine(mesh={"t": 8}, hosts=1, each=8).latency(("t",)) == 3 * ONE
    assert machine(mesh={"t": 5}, hosts=1, each=8).latency(("t",)) == 3 * ONE


def test_measured_collectives_go_before_the_links():
    entry = Measured(kind="all_gather", ranks=2, hosts=2, latency=1.0, bandwidth=512.0, contention=1.5)
    here = machine(measured=[entry])
    assert here.collective("all_gather", ("a",), 2048, 1024) == 1 + 2
    assert here.collective("all_gather", ("a",), 2048, 1024, messages=3) == 3 + 2
    assert here.collective("all_gather", ("b",), 2048, 1024) == ONE + 1024 / 2**20
    assert here.collective("reduce_scatter", ("a",), 2048, 1024) == FAR + 1024 / 2**18
    assert here.contention("all_gather", ("a",)) == 1.5 and here.contention("all_gather", ("b",)) == 1


def test_a_measured_message_takes_at_least_so_long():
    here = machine(measured=[Measured(kind="all_gather", ranks=2, hosts=2, latency=1.0, bandwidth=512.0, least=2.5)])
    assert here.collective("all_gather", ("a",), 1024, 512) == 2.5
    assert here.collective("all_gather", ("a",), 2048, 1024) == 1 + 2
    assert here.collective("all_gather", ("a",), 2048, 1024, messages=4) == 4 * 2.5  # each of 256 bytes


def test_a_message_takes_at_least_so_long_over_each_hop_of_a_link():
    within, between = WITHIN.model_copy(update={"least": 2**-6}), BETWEEN.model_copy(update={"least": 2**-4})
    here = machine(within=within, between=between)
    least, far = 2**-6, 2**-4
    assert here.collective("all_gather", ("b",), 2048, 1024) == least
    assert here.collective("all_gather", ("b",), 2048, 1024, messages=3) == 3 * least
    assert here.collective("all_reduce", ("a",), 1024, 1024) == 2 * far
    assert here.collective("all_gather", ("b",), 2**21, 2**20) == ONE + 1, "more takes what its bytes take"
    assert here.ring("all_gather", ("b",), 2048, 1024, 2) == 2 * least
    assert here.ring("all_gather", ("b",), 2**21, 2**20, 2) == 2 * ONE + 1


def test_a_missing_link_is_named():
    with pytest.raises(sw.InputError, match=r"^links: found null; allowed: the cluster's links"):
        machine(links=False).collective("all_gather", ("b",), 8, 4)
    alone = machine(between=None)
    assert alone.collective("all_gather", ("b",), 2048, 1024) == ONE + 1024 / 2**20
    with pytest.raises(sw.InputError, match=r"^links\.between_hosts: found null; allowed: a link"):
        alone.collective("all_gather", ("a",), 8, 4)


def test_e5_a_small_message_costs_its_latency_and_a_gather_its_gathered_size():
    for backend, kind, axes in itertools.product(("gloo", "nccl"), list(COLLECTIVES), (("a",), ("b",), ("a", "b"))):
        here = machine(backend=backend)
        assert here.collective(kind, axes, 1024, 1024) > here.latency(axes) > 0
    here = machine()
    assert here.collective("all_gather", ("b",), 2048, 0) == here.collective("all_gather", ("b",), 2048, 1024)
    assert machine(mesh={"t": 1}).collective("all_gather", ("t",), 2048, 0) == 0


@settings(deadline=None)
@given(
    backend=st.sampled_from(["gloo", "nccl"]),
    kind=st.sampled_from(list(COLLECTIVES)),
    axes=st.sampled_from([("a",), ("b",), ("a", "b")]),
    size=st.integers(0, 2**40),
    sent=st.integers(0, 2**40),
    more=st.integers(0, 2**30),
    messages=st.integers(1, 9),
)
def test_more_bytes_are_never_faster(backend, kind, axes, size, sent, more, messages):
    here = machine(backend=backend)
    for takes in (here.collective, here.ring):
        seconds = takes(kind, axes, size, sent, messages)
        assert takes(kind, axes, size + more, sent, messages) >= seconds
        assert takes(kind, axes, size, sent + more, messages) >= seconds
        assert takes(kind, axes, size, sent, messages + 1) > seconds


# -- machines that ship -----------------------------------------------------------------------------------------------


def test_devices_by_name():
    big = Cluster.named("16384xH100-80GB")
    assert (big.hosts, big.devices_per_host, big.devices) == (2048, 8, 16384)
    assert (Cluster.named("3xA100-80GB").hosts, Cluster.named("3xA100-80GB").devices) == (1, 3)
    for text in ("12xH200", "H200", "0xH200", "8xB1000", "x", "8 x H200", "-8xH200", "8xH200x"):
        with pytest.raises(sw.InputError, match=r"^devices: found '"):
            Cluster.named(text)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_machine_answers(path):
    assert path.read_text().count('"') >= 4, "names its sources"
    here = Machine(Cluster.named(f"16x{path.stem}"), {"data": 2, "tensor": 8}, "bfloat16", "nccl")
    assert 1e-4 < here.product(8192, 8192, 8192) < 1e-2
    gather = here.collective("all_gather", ("data", "tensor"), 2**30, 2**30 * 15 // 16)
    assert 2**30 / 1e12 < gather < 2**30 / 1e11
    assert here.collective("all_gather", ("data",), 2**30, 2**29) > gather  # one card against eight


def test_a_mesh_of_16384_ranks():
    here = Machine(Cluster.named("16384xH100-80GB"), {"data": 128, "m": 16, "tensor": 8}, "bfloat16", "nccl")
    assert here.spread(("data", "m", "tensor")) == Spread(16384, 2048, 8, 8)
    assert here.spread(("data", "m")) == Spread(2048, 2048, 1, 1)
    assert here.spread(("tensor",)) == Spread(8, 1, 8, 8)
    assert here.latency(("data", "tensor")) == pytest.approx(3 * 3e-6 + 7 * 5e-6)


def test_formulas_need_no_torch():
    code = "import sys, shardwright.simulate.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
