"""The recorder and the readers of its trace."""

from __future__ import annotations

import collections
import gc
import gzip
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.trace import CATEGORIES, PHASES, Alloc, Free, Op, Trace, active, plain, record, span


def build(width=32, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def two_steps(width=32, rows=4, recompute=False, micro=1):
    model, optimizer = build(width)
    x = torch.empty(rows, 16) if torch._guards.detect_fake_mode() else torch.randn(rows, 16)
    with record(model, optimizer) as trace:
        for _ in range(2):
            for _ in range(micro):
                y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
                with span("loss"):
                    loss = y.square().mean()
                loss.backward()
                del loss, y
            optimizer.step()
            optimizer.zero_grad()
    return trace


def test_ledger_points_by_formula():
    """Two linears, fp32: parameters P, moments 2P + a step count each, saved x, ReLU's input and output, and y."""
    rows, width = 4, 32
    trace = two_steps(width, rows)
    parameters = 4 * (16 * width + width + width * 8 + 8)
    moments = 2 * parameters + 4 * 4
    points = {(p.step, p.name): p for p in trace.points}
    assert [p.name for p in trace.points] == [
        "start",
        "after forward",
        "after loss",
        "after backward",
        "after step",
        "done",
    ] * 2
    saved = 4 * (rows * 16 + rows * width + rows * 8)  # x, relu's result, y for the square
    assert trace.saved_bytes == saved
    forward = points[1, "after forward"]
    assert forward.categories["parameter"] == parameters
    assert forward.categories["input"] == 4 * rows * 16
    assert forward.categories["saved"] == saved - 4 * rows * 16
    assert points[1, "after backward"].categories["gradient"] == parameters
    assert points[1, "after forward"].categories["optimizer"] == 0
    assert points[1, "after step"].categories["optimizer"] == moments
    assert points[2, "start"].total == parameters + moments + 4 * rows * 16
    assert points[2, "done"].total == points[1, "done"].total


def test_each_column_sums_to_its_total_and_every_byte_has_an_owner():
    trace = two_steps()
    for moment in (*trace.points, *trace.peaks):
        assert sum(moment.categories.values()) == moment.total
        assert list(moment.categories) == list(CATEGORIES)
    for storage in trace.storages:
        assert storage.category in CATEGORIES
        if storage.category == "temporary":
            assert storage.op, "a temporary names its operator"
    lines = trace.table().splitlines()
    assert lines[0].split("  ")[0] == "" and lines[-1].startswith("total")
    columns = [[int(cell.replace(",", "")) for cell in line.split()[1:]] for line in lines[1:]]
    assert [sum(column) for column in zip(*columns[:-1], strict=True)] == columns[-1]


def test_the_ledger_tells_point_by_category_by_module():
    trace = two_steps()
    for point in trace.points:
        entries = [e for e in trace.ledger if (e.step, e.point) == (point.step, point.name)]
        assert sum(e.bytes for e in entries) == point.total
        for category in CATEGORIES:
            assert sum(e.bytes for e in entries if e.category == category) == point.categories[category]
    after = {(e.category, e.module): e.bytes for e in trace.ledger if (e.step, e.point) == (1, "after forward")}
    assert after["parameter", "0.weight"] == 4 * 16 * 32
    assert after["saved", "1"] == 4 * 4 * 32  # the ReLU's result


def test_the_peak_is_what_a_replay_of_allocations_gives():
    trace = two_steps()
    live, peak = 0, 0
    for event in trace.events:
        if isinstance(event, Alloc):
            live += trace.storages[event.storage].bytes
        elif isinstance(event, Free):
            live -= trace.storages[event.storage].bytes
        peak = max(peak, live)
    assert trace.peak_bytes == peak == max(trace.phase_peaks.values()) == sum(a.bytes for a in trace.alive_at_peak)
    assert list(trace.phase_peaks) == list(PHASES)
    sizes = [a.bytes for a in trace.alive_at_peak]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_fake_equals_real(recompute, micro):
    real = two_steps(recompute=recompute, micro=micro)
    with FakeTensorMode():
        fake = two_steps(recompute=recompute, micro=micro)
    outside = [[e for e in t.events if e.phase != "step"] for t in (fake, real)]
    assert outside[0] == outside[1]
    inside = [collections.Counter(e for e in t.events if e.phase == "step") for t in (fake, real)]
    assert inside[0] == inside[1]
    assert fake.peaks == real.peaks and fake.saved == real.saved


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_fake_equals_real_for_any_shape(width, rows):
    real = two_steps(width, rows)
    with FakeTensorMode():
        fake = two_steps(width, rows)
    assert fake.peaks == real.peaks and fake.saved == real.saved


def test_modules_own_what_they_make_in_forward_and_in_backward():
    trace = two_steps()
    by_phase = collections.defaultdict(set)
    for event in trace.events:
        if isinstance(event, Op) and event.name == "aten.mm.default":
            by_phase[event.phase].add(event.module)
        if isinstance(event, Op) and event.name == "aten.threshold_backward.default":
            assert event.module == "1"
    assert by_phase["backward"] == {"0", "2"}
    assert {e.module for e in trace.events if isinstance(e, Op) and e.name == "aten.addmm.default"} == {"0", "2"}


def test_what_the_graph_drops_is_not_saved():
    model, _ = build()
    x = torch.randn(4, 16)
    with record(model) as trace:
        model(x)  # dropped at once
        kept = model(x)
        kept.sum().backward()
    assert trace.saved_bytes == 4 * (4 * 16 + 4 * 32)
    with record(model) as trace, torch.no_grad():
        model(x)
    assert trace.saved_bytes == 0
    with record(model) as trace:
        kept = model(x)  # no backward: what the graph holds when the recording ends
    assert trace.saved_bytes == 4 * (4 * 16 + 4 * 32)
    assert kept.requires_grad


def test_a_detached_alias_costs_nothing_and_a_view_pins_its_base():
    base = torch.zeros(100)
    with record(base) as trace:
        view = base.detach()[10:20]
        copied = view.clone()
    assert trace.peak_bytes == 400 + 40
    assert copied.numel() == 10


def test_an_exception_leaves_no_hook_behind():
    model, optimizer = build()
    hooks = torch.nn.modules.module
    before = (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks), gc.isenabled())
    with pytest.raises(ZeroDivisionError), record(model, optimizer) as trace:
        model(torch.randn(4, 16))
        raise ZeroDivisionError
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks), gc.isenabled()) == before
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert trace.events
    with pytest.raises(TypeError, match="allowed: modules, optimizers and tensors"), record("x"):
        pass


def test_save_and_load(tmp_path):
    trace = two_steps()
    trace.arena = {"float32": [8, 4]}
    path = tmp_path / "step.trace"
    trace.save(path)
    again = Trace.load(path)
    assert again.events == trace.events and again.storages == trace.storages
    assert again.saved == trace.saved and again.arena == trace.arena
    assert again.peaks == trace.peaks and again.table() == trace.table()
    assert [p.name for p in tmp_path.iterdir()] == ["step.trace"]
    first = path.read_bytes()
    trace.save(path)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        gzip.compress(b"{}", mtime=0),
        gzip.compress(b"[1", mtime=0),
        gzip.compress(
            json.dumps(
                {"format": "shardwright.trace", "version": 99, "events": [], "storages": [], "saved": [], "arena": {}}
            ).encode(),
            mtime=0,
        ),
    ],
)
def test_a_file_that_is_no_trace_is_told_in_one_line(tmp_path, content):
    path = tmp_path / "x.trace"
    path.write_bytes(content)
    with pytest.raises(sw.InputError, match=r"allowed: a shardwright\.trace file of version 1") as caught:
        Trace.load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(sw.InputError, match="found no file"):
        Trace.load(tmp_path / "missing")


def test_an_observer_is_told_of_each_operator_and_of_the_storages_it_is_handed():
    class Observer:
        def __init__(self):
            self.told = []

        def operator(self, name, storages):
            self.told.append((name, storages))

    observer, (model, _), x = Observer(), build(), torch.randn(4, 16)
    with record(model, observer=observer) as trace:
        y = model(x)
        made = active().storage_of(torch.ones(3))
    del y
    operators = [event for event in trace.events if isinstance(event, Op)]
    assert [(name, len(storages)) for name, storages in observer.told] == [(o.name, len(o.shapes)) for o in operators]
    products = [storages for name, storages in observer.told if name == "aten.addmm.default"]
    assert [[trace.storages[number].category for number in storages] for storages in products] == [
        ["parameter", "input", "parameter"],
        ["parameter", "saved", "parameter"],
    ]
    assert trace.storages[made].bytes == 12


def test_what_a_tensor_on_its_way_will_hold_is_its_storage():
    arrived = torch.ones(3)
    assert plain(AsyncCollectiveTensor(arrived)) is arrived
