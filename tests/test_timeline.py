"""A step's time read off its trace: small traces by hand, properties, and rehearsals of a tiny Llama."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.simulate.machine import Machine
from shardwright.simulate.timeline import COMPUTE, Span, timeline
from shardwright.spec.cluster import Cluster, Device, Link, Links, Measured
from shardwright.trace import Collective, Op, Wait
from support import tiny

MESH = {"x": 2, "y": 2, "t": 3}


def machine(measured=(), mesh=MESH, backend="gloo", latency=0.0, bandwidth=1.0, flops=128.0, overhead=0.0, hosts=1):
    """One byte takes a second, within a host and between hosts, and so does one unit of ``op``."""
    ranks, link = math.prod(mesh.values()), Link(latency=latency, bandwidth=bandwidth)
    return Machine(
        Cluster(
            version=2,
            hosts=hosts,
            devices_per_host=ranks // hosts,
            device=Device(name="device", memory=2**30, flops={"float32": flops}, overhead=overhead),
            links=Links(within_host=link, between_hosts=link if hosts > 1 else None, measured=list(measured)),
        ),
        mesh,
        "float32",
        backend,
    )


def op(units, phase="forward", step=1, module="m"):
    """A product that takes ``units`` seconds: 2 · units · 8 · 8 operations."""
    return Op(step, phase, module, "aten.mm.default", ((units, 8), (8, 8)))


SEND = Op(1, "forward", "m", "c10d.send.default", ((4, 4),))


def begin(seconds, axes=("x",), mode="async", kind="all_gather", module="m", phase="forward"):
    """A collective that takes ``seconds``."""
    n = math.prod(MESH[axis] for axis in axes)
    size = seconds if kind == "all_reduce" else seconds * n // (n - 1)
    return Collective(1, phase, module, kind, axes, tuple(range(n)), size, seconds, mode)


def wait(axes=("x",), kind="all_gather", module="m", phase="forward"):
    return Wait(1, phase, module, kind, axes)


def test_blocking_stands_for_all_of_it():
    found = timeline([op(3), begin(4, mode="blocking"), op(5, "backward")], machine())
    assert (found.seconds, found.compute) == (12, 8)
    assert found.exposed == found.busy == {"x": 4}
    assert found.phases == {"forward": 7, "backward": 5}
    assert found.spans == (
        Span(COMPUTE, "aten.mm.default", "m", 0, 3),
        Span("x", "all_gather", "m", 3, 7),
        Span(COMPUTE, "aten.mm.default", "m", 7, 12),
    )


def test_async_stands_for_the_rest():
    found = timeline([begin(4), op(3), wait(), op(5)], machine())
    assert (found.seconds, found.compute) == (9, 8)
    assert (found.exposed, found.busy) == ({"x": 1}, {"x": 4})
    assert timeline([begin(4), op(6), wait()], machine()).exposed == {"x": 0}


def test_each_wait_is_for_its_piece():
    found = timeline([begin(4), op(1), wait(), op(1), wait(), op(1)], machine())
    assert (found.seconds, found.exposed) == (5, {"x": 2})  # halves are there at 2 and 4
    only = timeline([begin(4), op(1), wait(), op(1), op(1)], machine())
    assert (only.seconds, only.exposed) == (6, {"x": 3})


def test_a_ring_sends_a_piece_when_the_one_before_was_waited_for():
    ring = [begin(4, ("t",), "ring"), op(3), wait(("t",)), op(1), wait(("t",)), op(1)]
    found = timeline(ring, machine())
    assert (found.seconds, found.exposed, found.busy) == (6, {"t": 1}, {"t": 4})  # pieces 0–2 and 3–5
    gather = [dataclasses.replace(ring[0], mode="async"), *ring[1:]]
    assert timeline(gather, machine()).seconds == 5


def test_a_direct_reduce_scatter_has_two_pieces_under_way():
    mesh = {"q": 4}
    event = Collective(1, "forward", "m", "reduce_scatter", ("q",), (0, 1, 2, 3), 8, 6, "async")
    late = wait(("q",), "reduce_scatter")
    events = [event, op(5), late, op(1), late, op(1), late]
    found = timeline(events, machine(mesh=mesh))
    assert found.seconds == 7 and found.exposed == {"q": 0}  # two there at 4, the third leaves at 5
    # on nccl three waits are three launches, one after the other: they are there at 2, 7 and 9
    assert timeline(events, machine(mesh=mesh, backend="nccl")).seconds == 5 + 2 + 2


def test_pieces_of_a_gather_leave_together():
    late = wait(("q",))
    events = [Collective(1, "forward", "m", "all_gather", ("q",), (0, 1, 2, 3), 8, 6, "async"), op(7), *[late] * 3]
    assert timeline(events, machine(mesh={"q": 4})).seconds == 7


def test_it_begins_at_its_first_send():
    events = [begin(4, kind="reduce_scatter"), op(3), SEND, SEND, op(2), wait(kind="reduce_scatter")]
    assert timeline(events, machine()).seconds == 7
    assert timeline([event for event in events if event != SEND], machine()).seconds == 5
    assert timeline([begin(4), op(3), wait(), op(1), SEND], machine()).seconds == 5  # not one after its wait


def test_the_collective_logged_last_sends_first():
    """A ring's backward: the sum is logged, then the gather, which sends before the first share is formed."""
    scatter, gather = begin(4, kind="reduce_scatter", mode="ring"), begin(2, ("y",), mode="ring")
    view = Op(1, "forward", "m", "aten.slice.Tensor", ((4, 4),))
    events = [scatter, gather, SEND, view, SEND, op(1), op(1), SEND, wait(("y",)), op(1), wait(kind="reduce_scatter")]
    found = timeline(events, machine())
    assert [span for span in found.spans if span.stream != COMPUTE] == [
        Span("y", "all_gather", "m", 0, 2),
        Span("x", "reduce_scatter", "m", 2, 6),
    ]


def test_a_blocking_collective_claims_its_own_sends():
    events = [begin(4), begin(1, ("y",), "blocking", "all_reduce"), SEND, op(1), SEND, wait()]
    found = timeline(events, machine())
    assert Span("x", "all_gather", "m", 2, 6) in found.spans and found.seconds == 6


def test_streams_of_two_axes_run_together_and_one_stream_in_order():
    two_hosts = machine(mesh={"x": 2, "y": 2}, hosts=2)
    apart = timeline([begin(4), begin(4, ("y",)), wait(), wait(("y",))], two_hosts)
    assert (apart.seconds, apart.busy, apart.exposed) == (4, {"x": 4, "y": 4}, {"x": 4, "y": 0})
    one = timeline([begin(4), begin(4, module="other"), op(1), wait(module="other")], machine())
    assert (one.seconds, one.exposed) == (8, {"x": 7})


def test_two_axes_share_a_link():
    """The first two bytes of either take four seconds; then the longer one has the link for itself."""
    found = timeline([begin(5), begin(2, ("y",)), wait(("y",)), op(1), wait()], machine())
    assert [span for span in found.spans if span.stream != COMPUTE] == [
        Span("y", "all_gather", "m", 0, 4),
        Span("x", "all_gather", "m", 0, 7),
    ]
    assert (found.seconds, found.compute, found.exposed) == (7, 1, {"x": 2, "y": 4})


def test_a_group_over_two_axes_takes_both_streams():
    both = ("x", "y")
    events = [begin(2), begin(3, both), begin(5, ("y",)), wait(both), op(1), wait(("y",))]
    found = timeline(events, machine())
    assert [span for span in found.spans if span.stream != COMPUTE] == [
        Span("x", "all_gather", "m", 0, 2),
        Span("x", "all_gather", "m", 2, 5),
        Span("y", "all_gather", "m", 2, 5),
        Span("y", "all_gather", "m", 5, 10),
    ]
    assert (found.seconds, found.compute, found.exposed) == (10, 1, {"x": 5, "y": 9})


def test_beside_compute_both_may_be_slower():
    entry = Measured(kind="all_gather", ranks=2, hosts=1, latency=0, bandwidth=1, contention=2)
    found = timeline([begin(4), op(4), wait(), op(1)], machine([entry]))
    assert (found.seconds, found.compute, found.exposed, found.busy) == (9, 9, {"x": 0}, {"x": 8})  # at half speed each
    short = timeline([begin(2), op(4), wait(), op(1)], machine([entry]))
    assert (short.seconds, short.compute, short.busy) == (7, 7, {"x": 4})
    long = timeline([begin(4), op(2), wait(), op(1)], machine([entry]))
    assert (long.seconds, long.compute, long.exposed) == (7, 5, {"x": 2})
    assert timeline([op(4), begin(4, mode="blocking")], machine([entry])).seconds == 8


def test_what_is_never_waited_for_is_there_at_the_end():
    found = timeline([begin(4, kind="all_reduce"), op(1, "step")], machine())
    assert (found.seconds, found.exposed) == (4, {"x": 3})
    assert found.phases == {"forward": 0, "step": 4}
    assert timeline([wait(), op(1)], machine()).seconds == 1  # issued before this part of the trace
    ring = [begin(4, ("t",), "ring"), op(1), wait(("t",)), wait(("t",))]
    assert timeline(ring[:-1], machine()).seconds == 4


def test_waits_of_one_name_are_dealt_out():
    """Three gathers of a site's dYs, whose first halves are awaited, then the second ones; then the name again."""
    events = [*[begin(2)] * 3, *[wait()] * 3, op(1), *[wait()] * 3, op(2)]
    found = timeline(events, machine())
    assert (found.seconds, found.exposed) == (8, {"x": 5})  # the third one's first half is there at 5
    again = timeline([begin(2), wait(), wait(), begin(4), wait(), op(5)], machine())
    assert again.seconds == 11


def test_pieces_that_follow_each_other_pay_their_latency():
    launches = [begin(4, kind="all_reduce"), *[wait(kind="all_reduce")] * 2]
    assert timeline(launches, machine(latency=1.0)).seconds == 4 + 2 * 2  # up and down the tree, twice
    assert timeline([begin(4), wait(), wait()], machine(latency=1.0)).seconds == 4 + 1
    ring = [begin(4, ("t",), "ring"), *[wait(("t",))] * 2]
    assert timeline(ring, machine(latency=1.0)).seconds == 4 + 2


def test_a_step_is_chosen_and_a_part_can_be_timed():
    trace = sw.Trace([op(1), op(2, step=2), op(4, step=2)])
    assert [timeline(trace, machine(), step).seconds for step in (1, 2, None)] == [1, 6, 7]
    assert timeline(trace.events[1:2], machine(), 2).seconds == 2
    empty = timeline([], machine())
    assert (empty.seconds, empty.phases, empty.spans) == (0, {}, ())


# -- properties -------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw):
    """Collectives of any kind that are waited for some products later, each in as many pieces as its kind has."""
    events, due = [], []
    for index in range(draw(st.integers(1, 8))):
        axes = draw(st.sampled_from([("x",), ("y",), ("x", "y")]))
        kind = draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]))
        name = f"m{index}"
        events.append(begin(draw(st.integers(0, 9)) * 3, axes, kind=kind, module=name))
        pieces = draw(st.integers(1, 3)) if kind == "all_gather" else 1
        due += [wait(axes, kind, name)] * pieces
        for _ in range(draw(st.integers(0, 3))):
            events.append(op(draw(st.integers(0, 6)) or 1))
            if due and draw(st.booleans()):
                events.append(due.pop(0))
    return [*events, *due]


BESIDE = [
    Measured(kind=kind, ranks=ranks, hosts=1, latency=0.5, bandwidth=1, contention=1.5)
    for kind in ("all_gather", "all_reduce")
    for ranks in (2, 4)
]


@settings(deadline=None)
@given(traces(), st.booleans())
def test_overlap_never_costs_and_no_stream_is_busy_longer_than_the_step(events, slowed):
    here = machine(BESIDE if slowed else ())
    found = timeline(events, here)
    blocking = timeline(
        [dataclasses.replace(e, mode="blocking") if isinstance(e, Collective) else e for e in events], here
    )
    assert found.seconds <= blocking.seconds * (1 + 1e-12)
    assert blocking.compute == sum(e.shapes[0][0] for e in events if isinstance(e, Op))
    same = found.compute == pytest.approx(blocking.compute, rel=1e-12)  # spans beside others are summed in parts
    assert same or (slowed and found.compute > blocking.compute)
    for line in (found, blocking):
        assert line.seconds * (1 + 1e-12) >= max(line.compute, *line.busy.values())
        assert sum(line.phases.values()) == pytest.approx(line.seconds, rel=1e-12)
        assert line.seconds - line.compute <= sum(line.exposed.values()) + 1e-9
        for stream in {span.stream for span in line.spans}:
            spans = [span for span in line.spans if span.stream == stream]
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))


@settings(deadline=None)
@given(traces(), st.integers(0, 7), st.integers(1, 9))
def test_more_bytes_never_make_a_step_faster(events, place, more):
    places = [index for index, event in enumerate(events) if isinstance(event, Collective)]
    index = places[place % len(places)]
    larger = dataclasses.replace(
        events[index], size=events[index].size + 12 * more, sent=events[index].sent + 12 * more
    )
    slower = [*events[:index], larger, *events[index + 1 :]]
    assert timeline(slower, machine()).seconds >= timeline(events, machine()).seconds * (1 - 1e-12)


# -- rehearsals -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed():
    axes = {"data": 2, "tensor": 2}
    plans = {
        mode: tiny.plan_of(axes, f"sequence-parallel{mode}", micro_batch=4, params={"*": "parameters"})
        for mode in ("", "-async", "-ring")
    }
    return {mode: sw.rehearse(tiny.config_path(), plan, steps=1) for mode, plan in plans.items()}


def test_modes_of_a_tiny_llama(rehearsed):
    """The same products and bytes: async and ring hide some of the tensor axis's communication, blocking none."""
    here = machine(mesh={"data": 2, "tensor": 2}, bandwidth=2e6, flops=1e9, hosts=2)
    found = {mode: timeline(trace, here) for mode, trace in rehearsed.items()}
    assert found["-async"].compute == pytest.approx(found[""].compute, rel=1e-9)
    assert found["-ring"].compute == pytest.approx(found[""].compute, rel=1e-9)
    for mode, line in found.items():
        assert set(line.phases) == {"forward", "loss", "backward", "step"}
        assert line.seconds >= max(line.compute, *line.busy.values()), mode
        assert line.busy == pytest.approx(found[""].busy, rel=1e-6)
    # what the store reduces overlaps in every mode: the small gradients of norms, over both axes
    assert 0.99 * found[""].busy["tensor"] < found[""].exposed["tensor"] < found[""].busy["tensor"]
    for mode in ("-async", "-ring"):
        assert found[mode].exposed["tensor"] < 0.9 * found[""].exposed["tensor"]
        assert found[mode].seconds < found[""].seconds


def test_every_wait_of_a_rehearsal_is_for_something(rehearsed):
    """With an infinite network nothing is exposed; with nothing to compute everything is."""
    for trace in rehearsed.values():
        mesh = {"data": 2, "tensor": 2}
        fast = timeline(trace, machine(mesh=mesh, bandwidth=1e30, flops=1e9))
        assert fast.seconds == pytest.approx(fast.compute)
        slow = timeline(trace, machine(mesh=mesh, bandwidth=1e6, flops=1e30))
        assert slow.seconds <= sum(slow.busy.values()) * (1 + 1e-9)
        assert slow.compute == pytest.approx(0, abs=1e-6 * slow.seconds)


def test_a_block_of_a_rehearsal(rehearsed):
    """Two equal blocks take the same; all blocks and the rest take at most a bit more apart than together."""
    here = machine(mesh={"data": 2, "tensor": 2}, bandwidth=2e6, flops=1e9)
    forward = [event for event in rehearsed[""].events if event.phase == "forward"]
    blocks = [
        [event for event in forward if getattr(event, "module", "").startswith(f"model.layers.{index}.")]
        for index in range(2)
    ]
    first, second = (timeline(events=block, machine=here) for block in blocks)
    assert first.seconds == pytest.approx(second.seconds) and first.compute > 0
