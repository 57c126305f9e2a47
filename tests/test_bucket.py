"""The gradient bucket: sums against dense ones; memory and collectives as the trace has them."""

from __future__ import annotations

import gc
import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.comm.exchange import ReduceScatterHandle
from shardwright.runtime.packed import PackedAllGatherHandle, PackedAllReduceHandle
from shardwright.runtime.runtime import Runtime
from shardwright.spec.mesh import chunk
from shardwright.trace import Alloc, Free, record
from support import dense
from support.ranks import on_ranks

KIB, MIB = 2**10, 2**20
SHAPES = [(64,), (7,), (3, 5), (1,), (10, 2, 3), (64,), (33,), (2, 1)]


def line(name: str = "data"):
    return dense.mesh_of(**{name: dist.get_world_size()})


def gradient_of(shape, rank: int, number: int, dtype=torch.float32) -> torch.Tensor:
    """Whole numbers: their sums are exact in every order."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def summed(shape, number: int) -> torch.Tensor:
    return sum(gradient_of(shape, rank, number, torch.float64) for rank in range(dist.get_world_size()))


def mine(whole: torch.Tensor) -> torch.Tensor:
    start, stop = chunk(whole.shape[0], dist.get_world_size(), dist.get_rank())
    return whole[start:stop]


def empty_for(gradient: torch.Tensor, kind: str, dtype=None) -> torch.Tensor:
    return torch.zeros_like(mine(gradient) if kind == "reduce_scatter" else gradient, dtype=dtype or gradient.dtype)


def padded(shape, kind: str, itemsize: int = 4) -> int:
    lanes = dist.get_world_size() if kind == "reduce_scatter" else 1
    return lanes * -(-shape[0] // lanes) * math.prod(shape[1:]) * itemsize


def greedily(sizes: list[int], room: int) -> list[int]:
    """What each bin holds, packed in order of arrival."""
    bins: list[int] = []
    for size in sizes:
        if not bins or bins[-1] + size > room:
            bins.append(0)
        bins[-1] += size
    return bins


def most_alive(trace, category: str = "bucket") -> tuple[int, int]:
    """The most bytes of the category alive at once, and those alive in the end."""
    alive = most = 0
    for event in trace.events:
        if isinstance(event, Alloc | Free) and trace.storages[event.storage].category == category:
            size = trace.storages[event.storage].bytes
            alive += size if isinstance(event, Alloc) else -size
            most = max(most, alive)
    return most, alive


def reduce_all(shapes, cap, kind="reduce_scatter", dtype=torch.float32, total=None, reduce_dtype=None, told=False):
    """Small gradients go through a bucket: (are all sums right, collectives, most bytes, bytes left, bins, leased)."""
    bucket = sw.GradientBucket(cap, axes=line(), kind=kind, reduce_dtype=reduce_dtype)
    gradients = [gradient_of(shape, dist.get_rank(), i, dtype) for i, shape in enumerate(shapes)]
    destinations = [empty_for(gradient, kind, total) for gradient in gradients]
    small = [bucket.takes(g, d) for g, d in zip(gradients, destinations, strict=True)]
    with record(*gradients, *destinations) as trace:
        if told:
            for gradient, destination, fits in zip(gradients, destinations, small, strict=True):
                if fits:
                    bucket.expect(gradient, destination)
        for gradient, destination, fits in zip(gradients, destinations, small, strict=True):
            if fits:
                bucket.add(gradient, destination)
                bucket.advance()
        bucket.flush()
    fine = True
    for number, (shape, destination, fits) in enumerate(zip(shapes, destinations, small, strict=True)):
        whole = summed(shape, number)
        expected = (mine(whole) if kind == "reduce_scatter" else whole) * fits
        fine = fine and torch.equal(destination.double(), expected)
    travels = dtype if kind == "reduce_scatter" else reduce_dtype or total or dtype
    sizes = [padded(shape, kind, travels.itemsize) for shape in shapes]
    fine = fine and small == [4 * size <= bucket.cap for size in sizes]
    due = greedily([size for size, fits in zip(sizes, small, strict=True) if fits], bucket.cap // 2)
    logged = [(c.module, c.kind, c.size, c.sent) for c in trace.collectives]
    return fine, logged, *most_alive(trace), due, Runtime.of(line()).arena.held


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_small_gradients_share_bins_by_greedy_packing(n, kind):
    for fine, logged, most, left, due, held in on_ranks(n, reduce_all, SHAPES * 3, KIB, kind):
        assert fine and left == held == 0
        assert [size for _, _, size, _ in logged] == (due if n > 1 else []) and len(due) > 1
        assert most <= KIB + KIB // n if n > 1 else most == 0
        assert all((module, found) == ("bucket", kind) for module, found, *_ in logged)
        for _, _, size, sent in logged:
            assert sent == (1 if kind == "reduce_scatter" else 2) * size * (n - 1) // n
            assert size <= KIB // 2


@pytest.mark.parametrize("cap", [MIB, 25 * MIB])
@pytest.mark.parametrize("n", [2, 8])
def test_the_cap_is_honoured(n, cap):
    shapes = [(cap // 16,), (cap // 16 - 64,), (5,), (cap // 64, 3), (cap // 16,), (cap // 32,)]  # ¼ of the cap, …
    for fine, logged, most, left, due, _ in on_ranks(n, reduce_all, shapes, cap):
        assert fine and len(logged) == len(due) == 3
        # one bin fills, one travels, and of that up to two lanes arrive
        assert most == cap + max(due[:-1]) * min(2, n - 1) // n <= cap + cap // n
        assert most > 0.99 * (cap + cap / 2 * min(2, n - 1) / n) and left == 0


def test_large_gradients_are_not_taken():
    for fine, logged, *_ in on_ranks(2, reduce_all, [(64,), (65,), (64,)], KIB):
        assert fine and [size for *_, size, _ in logged] == [512]


@pytest.mark.parametrize("n", [2, 4])
def test_a_bin_is_not_larger_than_what_is_expected(n):
    sizes = [64 * 4, 8 * 4, 16 * 4]
    for fine, logged, most, left, due, _ in on_ranks(
        n, reduce_all, [(64,), (8,), (4, 4)], MIB, "reduce_scatter", torch.float32, None, None, True
    ):
        assert fine and len(logged) == len(due) == 1 and left == 0
        assert most == sum(sizes) * (n + min(2, n - 1)) // n


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    "dtype, total, reduce_dtype, travels",
    [
        (torch.bfloat16, torch.float32, None, (2, 4)),
        (torch.bfloat16, torch.bfloat16, torch.float32, (2, 4)),
        (torch.bfloat16, torch.bfloat16, None, (2, 2)),
        (torch.float32, torch.float32, torch.float64, (4, 8)),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_low_precision_travels_and_adds_up_in_the_type_of_its_sum(n, dtype, total, reduce_dtype, travels, kind):
    cap = 2 * KIB
    for fine, logged, most, left, due, _ in on_ranks(n, reduce_all, SHAPES * 4, cap, kind, dtype, total, reduce_dtype):
        assert fine and len(logged) == len(due) and left == 0
        assert most <= cap + cap // n
        width = travels[kind == "all_reduce"]
        assert sum(size for _, _, size, _ in logged) == 4 * sum(padded_on(n, s, kind) for s in SHAPES) * width


def padded_on(n, shape, kind):
    lanes = n if kind == "reduce_scatter" else 1
    return lanes * -(-shape[0] // lanes) * math.prod(shape[1:])


def small_addends(total, reduce_dtype, kind):
    """1 from the first rank, 2⁻⁹ from the others: lost in bfloat16 one by one, in float32 not."""
    n = dist.get_world_size()
    gradient = torch.full((n, 3), 1.0 if dist.get_rank() == 0 else 2.0**-9, dtype=torch.bfloat16)
    destination = empty_for(gradient, kind, total)
    bucket = sw.GradientBucket(KIB, axes=line(), reduce_dtype=reduce_dtype, kind=kind)
    bucket.add(gradient, destination)
    bucket.flush()
    return destination.unique().tolist()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_sums_of_bfloat16_are_taken_in_float32(kind):
    for found in on_ranks(2, small_addends, torch.float32, None, kind):
        assert found == [1.001953125]
    for found in on_ranks(8, small_addends, torch.bfloat16, torch.float32, kind):
        assert found == [1.015625]  # 1 + 7·2⁻⁹ = 1.0137, to the nearest of bfloat16


def bits():
    """Random values: bit for bit what a reduce-scatter from the gradient's own storage makes."""
    group = Runtime.of(line()).group(("data",))
    gradient = torch.randn(13, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    alone, shared = empty_for(gradient, "reduce_scatter"), empty_for(gradient, "reduce_scatter")
    ReduceScatterHandle(gradient, alone, group, "", "blocking").finish()
    bucket = sw.GradientBucket(KIB, axes=line())
    bucket.add(gradient.t().contiguous().t(), shared)  # with gaps: no matter
    bucket.flush()
    return torch.equal(alone, shared)


@pytest.mark.parametrize("n", [3, 8])
def test_sums_are_bitwise_those_of_a_reduce_scatter_of_its_own(n):
    assert all(on_ranks(n, bits))


def drop_a_pass(bucket, gradients, destinations):
    """Nothing is held afterwards, and nobody hears that anything has landed."""
    arena, landed = Runtime.of(line()).arena, []
    for number, pair in enumerate(zip(gradients, destinations, strict=True)):
        bucket.add(*pair, lambda number=number: landed.append(number))
    before, alone = list(landed), dist.get_world_size() == 1
    assert (arena.held > 0) != alone and (len(before) < len(gradients)) != alone
    bucket.abandon()
    assert arena.held == 0 and landed == before


def accumulated(kind):
    """Two passes into the same destinations, flushes at odd places, and one that drops all in between."""
    bucket, other = (sw.GradientBucket(2 * KIB, axes=line(), kind=kind) for _ in range(2))
    gradients = [gradient_of(shape, dist.get_rank(), i) for i, shape in enumerate(SHAPES)]
    destinations = [empty_for(gradient, kind) for gradient in gradients]
    order = []
    for _ in range(2):
        for number, pair in enumerate(zip(gradients, destinations, strict=True)):
            (bucket if number % 3 else other).add(*pair, lambda number=number: order.append(number))
            if number == 4:
                other.flush()
                order.append("flushed")
        bucket.flush()
        drop_a_pass(bucket, gradients * 4, [empty_for(gradient, kind) for gradient in gradients * 4])
    bucket.flush()
    wholes = [summed(shape, i) for i, shape in enumerate(SHAPES)]
    expected = [2 * (mine(whole) if kind == "reduce_scatter" else whole) for whole in wholes]
    fine = all(torch.equal(d.double(), e) for d, e in zip(destinations, expected, strict=True))
    return fine, order


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_interleaved_adds_and_flushes_add_up_and_a_dropped_pass_leaves_nothing(n, kind):
    for fine, order in on_ranks(n, accumulated, kind):
        assert fine and order == [0, 1, 2, 3, 4, "flushed", 5, 6, 7] * 2


def in_place():
    gradient = gradient_of((5, 3), dist.get_rank(), 0)
    bucket = sw.GradientBucket(KIB, axes=line(), kind="all_reduce")
    scalar = torch.tensor(1.0)
    bucket.add(gradient, gradient)
    bucket.add(scalar, scalar)
    bucket.flush()
    return torch.equal(gradient.double(), summed((5, 3), 0)) and scalar.item() == dist.get_world_size()


@pytest.mark.parametrize("n", [1, 3])
def test_an_all_reduced_gradient_may_become_its_own_sum(n):
    assert all(on_ranks(n, in_place))


def one_destination(kind):
    """Several gradients of one bin may have one destination: micro-batches, say."""
    bucket = sw.GradientBucket(4 * KIB, axes=line(), kind=kind)
    gradients = [gradient_of((5, 3), dist.get_rank(), i) for i in range(4)]
    total = empty_for(gradients[0], kind)
    for gradient in gradients:
        bucket.add(gradient, total)
    bucket.flush()
    whole = sum(summed((5, 3), i) for i in range(4))
    return torch.equal(total.double(), mine(whole) if kind == "reduce_scatter" else whole)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_several_gradients_may_land_in_one_place(kind):
    assert all(on_ranks(3, one_destination, kind))


def flush_all(mesh):
    """Until nothing waits in any bucket of the mesh; what has landed may have added more to another."""
    buckets = Runtime.of(mesh)._buckets.values()
    while any(bins.busy for bins in buckets):
        for bins in tuple(buckets):
            bins.flush()


def chained():
    """What has landed from one bucket goes on into another: shards over one axis, copies over the other."""
    mesh = dense.mesh_of(replica=2, shard=2)
    scatter = sw.GradientBucket(KIB, axes=mesh["shard"])
    join = sw.GradientBucket(KIB, axes=mesh["replica"], kind="all_reduce")
    gradients = [gradient_of((6, 2), dist.get_rank(), i) for i in range(20)]
    parts = [torch.zeros(3, 2) for _ in gradients]
    for gradient, part in zip(gradients, parts, strict=True):
        scatter.add(gradient, part, lambda part=part: join.add(part, part))
    flush_all(mesh)
    place = mesh["shard"].get_local_rank()
    return all(torch.equal(part.double(), summed((6, 2), i)[3 * place : 3 * place + 3]) for i, part in enumerate(parts))


def test_what_has_landed_may_go_on_into_another_bucket():
    assert all(on_ranks(4, chained))


def only_in_backward():
    """Hooks feed the bucket: bytes by ledger point, and at the most in backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    bucket = sw.GradientBucket("1KiB", axes=line(), kind="all_reduce")
    arena = Runtime.of(line()).arena
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: bucket.add(p.grad, p.grad))
    held = []
    with record(model, optimizer) as trace:
        for _ in range(2):
            loss = model(torch.ones(4, 8)).sum()
            held.append(arena.held)
            loss.backward()
            bucket.flush()
            held.append(arena.held)
            optimizer.step()
            optimizer.zero_grad()
    return held, [(p.name, p.categories["bucket"]) for p in trace.points], trace.peaks


def test_the_bucket_lives_only_in_backward():
    for held, points, peaks in on_ranks(2, only_in_backward):
        assert held == [0] * 4
        assert all(size == 0 for name, size in points if name != "after backward")
        assert {peak.categories["bucket"] for peak in peaks if peak.phase == "step"} == {0}
        assert len(points) == 12


def keyed():
    mesh = dense.mesh_of(data=2, expert=1, tensor=2)
    runtime, cpu = Runtime.of(mesh), torch.device("cpu")

    def bucket(*axes, dtype=torch.float32):
        return runtime.bucket(runtime.group(axes), dtype, cpu)

    same = bucket("data") is bucket("data", "expert") is bucket("expert", "data")
    others = [bucket("data"), bucket("tensor"), bucket("data", "tensor"), bucket("data", dtype=torch.bfloat16)]
    before = len(runtime._buckets)
    # two of equal members fill one bin, and one flush serves both
    buckets = [sw.GradientBucket(KIB, axes=axes) for axes in (mesh["data"], mesh["data", "expert"])]
    destinations = [torch.zeros(1), torch.zeros(1)]
    with record() as trace:
        for each, destination in zip(buckets, destinations, strict=True):
            each.add(torch.ones(2), destination)
        buckets[0].flush()
    sums = [destination.item() for destination in destinations]
    return same, len({id(each) for each in others}), before, len(runtime._buckets), len(trace.collectives), sums


def test_buckets_are_keyed_by_ranks_type_and_device():
    for found in on_ranks(4, keyed):
        assert found == (True, 4, 4, 4, 1, [2.0, 2.0])


def refused():
    axes = line()
    with pytest.raises(sw.InputError, match="kind: found 'broadcast'; allowed: reduce_scatter, all_reduce"):
        sw.GradientBucket(axes=axes, kind="broadcast")
    with pytest.raises(sw.InputError, match=r"cap: found .*25MB"):
        sw.GradientBucket("25MB", axes=axes)
    assert not sw.GradientBucket(0, axes=axes).takes(torch.ones(0))
    assert not sw.GradientBucket(0, axes=axes).takes(torch.ones(1))
    bucket = sw.GradientBucket(64, axes=axes)
    with pytest.raises(sw.InputError, match=r"gradient: found 24 B, padded.*a fourth of the cap of 64 B"):
        bucket.add(torch.ones(5), torch.zeros(3))
    with pytest.raises(sw.InputError, match="in 0 dimensions"):
        bucket.add(torch.ones(()), torch.zeros(()))
    with pytest.raises(sw.InputError, match=r"destination: found shape \(4,\); allowed: \(2,\) without gaps"):
        bucket.add(torch.ones(4), torch.zeros(4))
    with pytest.raises(sw.InputError, match="with gaps"):
        bucket.add(torch.ones(4), torch.zeros(4)[::2])
    wide = sw.GradientBucket(64, axes=axes, reduce_dtype=torch.float64)
    with pytest.raises(sw.InputError, match=r"reduce_dtype: found torch.float64 .* at most twice as wide"):
        wide.add(torch.ones(4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16))
    empty = torch.zeros(0, 3)
    sw.GradientBucket(64, axes=axes).add(empty, empty.clone())
    return Runtime.of(axes).arena.held


def test_what_does_not_fit_is_refused_in_one_line():
    assert on_ranks(2, refused) == [0, 0]


def references():
    bucket = sw.GradientBucket(KIB, axes=line())
    gradient, destination = torch.ones(4), torch.zeros(2)
    alive = [weakref.ref(each.untyped_storage()) for each in (gradient, destination)]
    bucket.add(gradient, destination)
    bucket.flush()
    owned = destination.untyped_storage().nbytes() == destination.nbytes
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(5):
        sw.GradientBucket(KIB, axes=line()).add(gradient, destination)
        flush_all(line())
    del gradient, destination
    alive.append(weakref.ref(bucket))
    del bucket
    gc.collect()
    return owned, [each() is None for each in alive], len(dist.distributed_c10d._world.pg_map) - groups


def test_nothing_is_held_after_a_flush():
    assert on_ranks(2, references) == [(True, [True] * 3, 0)] * 2


def poisoned(shapes):
    arena = Runtime.of(line()).arena
    arena.poison = True
    try:
        return [reduce_all(shapes, KIB, kind)[0] for kind in ("reduce_scatter", "all_reduce")]
    finally:
        arena.poison = False


@pytest.mark.parametrize("n", [3, 4])
def test_released_and_unwritten_memory_is_never_read(n):
    assert on_ranks(n, poisoned, SHAPES * 3) == [[True, True]] * n


def whole_record(mesh, kind, dtype, total, reduce_dtype):
    """Every event of two rounds: bins, and packed collectives with leased buffers."""
    runtime = Runtime.of(mesh)
    bucket = sw.GradientBucket(KIB, axes=mesh, kind=kind, reduce_dtype=reduce_dtype)
    gradients = [torch.zeros(shape, dtype=dtype) for shape in SHAPES * 3]
    destinations = [empty_for(gradient, kind, total) for gradient in gradients]
    parts = [mine(gradient).clone() for gradient in gradients]
    group = runtime.group(("data",))
    with record(*gradients, *destinations, *parts) as trace:
        for _ in range(2):
            for pair in zip(gradients, destinations, strict=True):
                bucket.advance()
                bucket.add(*pair)
            bucket.flush()
            PackedAllGatherHandle(list(zip(parts, gradients, strict=True)), group, "a", "async", runtime.arena).finish()
            PackedAllReduceHandle(gradients, group, "b", "async", wide=True, arena=runtime.arena).finish()
    return trace.events, trace.storages


def recorded_really(*how):
    return whole_record(line(), *how)


def recorded_in_rehearsal(rank, world, *how):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
        Runtime.of(mesh)
        with FakeTensorMode():
            return whole_record(mesh, *how)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("n", [2, 4])
def test_a_rehearsal_records_what_a_run_does(n, reduce_dtype, kind):
    how = kind, torch.bfloat16, torch.bfloat16, reduce_dtype
    real = on_ranks(n, recorded_really, *how)
    for rank in (0, n - 1):
        assert recorded_in_rehearsal(rank, n, *how) == real[rank]


def as_on_nccl(shapes, kind, dtype, total):
    """What is declared NCCL takes its collectives, here over gloo, and sums in the type that travels."""
    runtime = Runtime(line(), "nccl")
    group = runtime.group(("data",))
    bucket = sw.GradientBucket.over(runtime, group, 2 * KIB, kind)
    gradients = [gradient_of(shape, dist.get_rank(), i, dtype) for i, shape in enumerate(shapes)]
    destinations = [empty_for(gradient, kind, total) for gradient in gradients]
    reduce_scatter = dist.reduce_scatter_tensor

    def in_place(output, whole, **how):
        assert output.data_ptr() == whole.data_ptr() + dist.get_rank() * output.nbytes
        return reduce_scatter(output, whole, **how)

    with (
        record(*gradients, *destinations) as trace,
        mock.patch.object(dist, "reduce_scatter_tensor", in_place),
    ):
        for pair in zip(gradients, destinations, strict=True):
            bucket.add(*pair)
        bucket.flush()
    wholes = [summed(shape, number) for number, shape in enumerate(shapes)]
    parts = [mine(whole) if kind == "reduce_scatter" else whole for whole in wholes]
    fine = all(torch.equal(d.double(), part) for d, part in zip(destinations, parts, strict=True))
    due = greedily([padded(shape, kind, total.itemsize) for shape in shapes], KIB)
    pairs = [(mine(whole).float(), torch.zeros_like(whole, dtype=dtype)) for whole in wholes]
    PackedAllGatherHandle(pairs, group, "unit", "async").finish()
    gathered = all(torch.equal(found.double(), whole) for (_, found), whole in zip(pairs, wholes, strict=True))
    return fine, len(trace.collectives) == len(due) > 1, most_alive(trace) == (2 * KIB, 0), gathered


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_done_on_nccl(n, dtype, kind):
    shapes = [(64,), (7,), (3, 5), (1,), (33,), (2, 1)] * 3
    assert on_ranks(n, as_on_nccl, shapes, kind, dtype, torch.float32) == [(True, True, True, True)] * n


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=30)


@given(shapes=SIZES, cap=st.integers(64, 4096), n=st.sampled_from([2, 3, 4]))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_any_sizes_add_up_in_as_many_collectives_as_greedy_packing_needs(kind, shapes, cap, n):
    for fine, logged, most, left, due, _ in on_ranks(n, reduce_all, shapes, cap, kind):
        assert fine and [size for _, _, size, _ in logged] == due and left == 0 and most <= cap + cap / n
