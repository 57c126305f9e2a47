"""The grid linear against dense float64: numbers, collectives and saved bytes (ACCEPTANCE A1–A3, A5, A8–A12)."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.simulate.rehearsal import stage
from shardwright.spec.mesh import chunk
from support import dense
from support.ranks import on_ranks

SIZES = (1, 2, 3, 4)
T, K, N = 24, 36, 48  # divisible by every axis size
LAYOUTS = {
    "column all-reduce": sw.GridLayout(n=("tensor",), x="replicated"),
    "column keep": sw.GridLayout(n=("tensor",), x="sharded", save_x="gathered"),
    "column gather again": sw.GridLayout(n=("tensor",), x="sharded", save_x="shard"),
    "row all-reduce": sw.GridLayout(k=("tensor",), y="replicated"),
    "row scatter": sw.GridLayout(k=("tensor",), y="sharded"),
}


def with_data(layout: sw.GridLayout) -> sw.GridLayout:
    return sw.GridLayout(**{**layout.to_dict(), "m": ("data",)})


def run_linear(name, axes, bias=True, ndim=2, poison=False, frozen=()):
    """Y, dX, dW, db of one linear, as errors against dense, with the trace and this rank's local results."""
    mesh = dense.mesh_of(**axes)
    layout = with_data(LAYOUTS[name])
    reference = torch.nn.Linear(K, N, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(dense.random(N, K, seed=1))
        if bias:
            reference.bias.copy_(dense.random(N, seed=2))
    lin = sw.GridLinear.from_dense(reference, layout, mesh)
    if "w" in frozen:
        lin.weight.requires_grad_(False)
    sw.Runtime.of(mesh).arena.poison = poison
    shape = (T, K) if ndim == 2 else (1, T, K)
    x_whole, up = dense.random(*shape, seed=3), dense.random(*shape[:-1], N, seed=4)
    x = dense.part(x_whole, mesh, lin.input_placements).requires_grad_("x" not in frozen)
    gradient = dense.part(up, mesh, lin.output_placements)
    with sw.record(lin) as trace:
        y = lin(x)
        y.backward(gradient)
    x_whole.requires_grad_()
    reference(x_whole).backward(up)
    local = {"y": y.detach().clone(), "dx": x.grad, "dw": lin.weight.grad, "db": lin.bias.grad if bias else None}
    errors = {"y": dense.error(dense.whole(y, mesh, lin.output_placements), reference(x_whole))}
    if "x" not in frozen:
        errors["dx"] = dense.error(dense.whole(x.grad, mesh, lin.input_placements), x_whole.grad)
    if "w" not in frozen:
        errors["dw"] = dense.error(lin.weight.grad.full_tensor(), reference.weight.grad)
        assert lin.weight.grad.placements == lin.weight.placements
    if bias:
        errors["db"] = dense.error(lin.bias.grad.full_tensor(), reference.bias.grad)
    assert y.dim() == ndim
    assert sw.Runtime.of(mesh).arena.held == 0
    local = {k: v.to_local().clone() if hasattr(v, "to_local") else v for k, v in local.items()}
    return errors, local, trace


def over_tensor(trace):
    """(phase, kind, size) of the collectives over the tensor axis, in issue order."""
    return [(c.phase, c.kind, c.size) for c in trace.collectives if c.axes == ("tensor",)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_dense_on_every_rank(name, n):
    for errors, _, _ in on_ranks(n, run_linear, name, {"data": 1, "tensor": n}):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"data": 4, "tensor": 1}, {"data": 1, "tensor": 4}])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ndim", [2, 3])
def test_equals_dense_on_a_mesh(name, axes, ndim):
    for errors, _, _ in on_ranks(4, run_linear, name, axes, True, ndim):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("n", SIZES)
def test_a1_column_all_reduce(n):
    for _, _, trace in on_ranks(n, run_linear, "column all-reduce", {"data": 1, "tensor": n}, False):
        assert over_tensor(trace) == ([("backward", "all_reduce", T * K * 8)] if n > 1 else [])
        assert trace.saved_bytes == T * K * 8


@pytest.mark.parametrize("n", SIZES)
def test_a2_column_keep(n):
    for _, _, trace in on_ranks(n, run_linear, "column keep", {"data": 1, "tensor": n}, False):
        whole = T * K * 8
        expected = [("forward", "all_gather", whole), ("backward", "reduce_scatter", whole)]
        assert over_tensor(trace) == (expected if n > 1 else [])
        assert trace.saved_bytes == whole


@pytest.mark.parametrize("n", SIZES)
def test_a3_column_gather_again(n):
    axes = {"data": 1, "tensor": n}
    kept = on_ranks(n, run_linear, "column keep", axes)
    again = on_ranks(n, run_linear, "column gather again", axes)
    for (_, a, _), (_, b, trace) in zip(kept, again, strict=True):
        whole = T * K * 8
        expected = [
            ("forward", "all_gather", whole),
            ("backward", "all_gather", whole),
            ("backward", "reduce_scatter", whole),
        ]
        assert over_tensor(trace) == (expected if n > 1 else [])
        assert trace.saved_bytes == whole // n
        for key in a:
            assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("n", SIZES)
def test_a5_row(n):
    axes, whole = {"data": 1, "tensor": n}, T * N * 8
    for _, _, trace in on_ranks(n, run_linear, "row all-reduce", axes, False):
        assert over_tensor(trace) == ([("forward", "all_reduce", whole)] if n > 1 else [])
        assert trace.saved_bytes == T * K * 8 // n
    for _, _, trace in on_ranks(n, run_linear, "row scatter", axes, False):
        expected = [("forward", "reduce_scatter", whole), ("backward", "all_gather", whole)]
        assert over_tensor(trace) == (expected if n > 1 else [])
        assert trace.saved_bytes == T * K * 8 // n


@pytest.mark.parametrize("name", LAYOUTS)
def test_sent_bytes_and_transients(name):
    """Ring volume for each collective; the blocking forward needs the gathered X, the unreduced Y and 2/n scratch."""
    n = 4
    for _, _, trace in on_ranks(n, run_linear, name, {"data": 1, "tensor": n}, False):
        for c in trace.collectives:
            assert c.sent == c.size * (n - 1) // n * (2 if c.kind == "all_reduce" else 1)
        gathered = T * K * 8 if name in ("column keep", "column gather again") else 0
        unreduced = T * N * 8 if name.startswith("row") else 0
        scratch = 2 * unreduced // n if name == "row scatter" else 0
        x = T * K * 8 // (1 if name == "column all-reduce" else n)
        y = T * N * 8 // (1 if name == "row all-reduce" else n)
        weight = N * K * 8 // n
        before_loss = max(p.total for p in trace.peaks if p.phase == "forward")
        # The reduced Y is the unreduced storage itself in all-reduce mode, so it does not count twice.
        unreduced = 0 if name == "row all-reduce" else unreduced
        assert before_loss == weight + x + y + gathered + unreduced + scratch


@pytest.mark.parametrize("name", ["column keep", "column gather again", "column all-reduce"])
def test_a8_frozen_weight_saves_no_input_and_gathers_once(name):
    for errors, _, trace in on_ranks(2, run_linear, name, {"data": 1, "tensor": 2}, False, 2, False, ("w",)):
        assert max(errors.values()) <= 1e-12
        assert trace.saved_bytes == 0
        assert [c.kind for c in trace.collectives].count("all_gather") == (0 if "reduce" in name else 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a8_frozen_input_has_no_reduction(name):
    for errors, _, trace in on_ranks(2, run_linear, name, {"data": 1, "tensor": 2}, False, 2, False, ("x",)):
        assert max(errors.values()) <= 1e-12
        kinds = [c.kind for c in trace.collectives if c.phase == "backward"]
        assert "reduce_scatter" not in kinds and "all_reduce" not in kinds


def run_siblings(name, n):
    mesh = dense.mesh_of(data=1, tensor=n)
    layout = with_data(LAYOUTS[name])
    references = [torch.nn.Linear(K, width, dtype=torch.float64) for width in (N, N // 2, N // 4)]
    for seed, reference in enumerate(references):
        with torch.no_grad():
            reference.weight.copy_(dense.random(*reference.weight.shape, seed=seed))
            reference.bias.copy_(dense.random(*reference.bias.shape, seed=10 + seed))
    lins = sw.GridLinear.siblings(references, layout, mesh)
    holder = torch.nn.ModuleDict(dict(zip("qkv", lins, strict=True)))
    x_whole = dense.random(T, K, seed=20)
    ups = [dense.random(T, reference.out_features, seed=30 + i) for i, reference in enumerate(references)]
    x = dense.part(x_whole, mesh, lins[0].input_placements).requires_grad_()
    x_whole.requires_grad_()
    with sw.record(holder) as trace:
        ys = [lin(x) for lin in lins]
        torch.autograd.backward(
            ys, [dense.part(up, mesh, lin.output_placements) for up, lin in zip(ups, lins, strict=True)]
        )
    outs = [reference(x_whole) for reference in references]
    torch.autograd.backward(outs, ups)
    worst = dense.error(dense.whole(x.grad, mesh, lins[0].input_placements), x_whole.grad)
    for lin, y, reference, out in zip(lins, ys, references, outs, strict=True):
        worst = max(worst, dense.error(dense.whole(y, mesh, lin.output_placements), out))
        worst = max(worst, dense.error(lin.weight.grad.full_tensor(), reference.weight.grad))
        worst = max(worst, dense.error(lin.bias.grad.full_tensor(), reference.bias.grad))
    names = [name for name, _ in holder.named_parameters()]
    return worst, names, trace


@pytest.mark.parametrize("n", SIZES)
def test_a9_siblings_share_one_gather_one_reduction_one_saved_shard(n):
    for worst, names, trace in on_ranks(n, run_siblings, "column gather again", n):
        assert worst <= 1e-12
        assert names == [f"{key}.{part}" for key in "qkv" for part in ("weight", "bias")]
        kinds = [(phase, kind) for phase, kind, _ in over_tensor(trace)]
        expected = [("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")]
        assert kinds == (expected if n > 1 else [])
        assert trace.saved_bytes == T * K * 8 // n
    for worst, _, trace in on_ranks(n, run_siblings, "column all-reduce", n):
        assert worst <= 1e-12
        assert [kind for _, kind, _ in over_tensor(trace)] == (["all_reduce"] if n > 1 else [])


def run_stack(names, n, poison, interleaved):
    """Three linears in a row; two forwards before the backwards; gradients and outputs against dense."""
    mesh = dense.mesh_of(data=1, tensor=n)
    sw.Runtime.of(mesh).arena.poison = poison
    references = [torch.nn.Linear(K, K, bias=False, dtype=torch.float64) for _ in names]
    for seed, reference in enumerate(references):
        with torch.no_grad():
            reference.weight.copy_(dense.random(K, K, seed=seed))
    lins = [
        sw.GridLinear.from_dense(reference, with_data(LAYOUTS[name]), mesh)
        for name, reference in zip(names, references, strict=True)
    ]
    xs = [dense.random(T, K, seed=40), dense.random(T, K, seed=41)]
    ups = [dense.random(T, K, seed=50), dense.random(T, K, seed=51)]
    first, last = lins[0], lins[-1]
    locals_ = [dense.part(x, mesh, first.input_placements).requires_grad_() for x in xs]
    wholes = [x.requires_grad_() for x in xs]

    def chain(layers, value):
        for layer in layers:
            value = layer(value)
        return value

    if interleaved:
        ys = [chain(lins, x) for x in locals_]
        for y, up in zip(ys, ups, strict=True):
            y.backward(dense.part(up, mesh, last.output_placements))
    else:
        for x, up in zip(locals_, ups, strict=True):
            chain(lins, x).backward(dense.part(up, mesh, last.output_placements))
    for x, up in zip(wholes, ups, strict=True):
        chain(references, x).backward(up)
    results = [x.grad for x in locals_] + [lin.weight.grad.to_local() for lin in lins]
    worst = max(
        [
            dense.error(dense.whole(x.grad, mesh, first.input_placements), w.grad)
            for x, w in zip(locals_, wholes, strict=True)
        ]
        + [
            dense.error(lin.weight.grad.full_tensor(), reference.weight.grad)
            for lin, reference in zip(lins, references, strict=True)
        ]
    )
    scale = max(reference.weight.grad.abs().max().item() for reference in references)
    return worst / scale, [r.clone() for r in results]


STACKS = [
    ("column gather again", "row scatter", "column keep"),
    ("column all-reduce", "row all-reduce", "column all-reduce"),
    ("column keep", "row scatter", "column gather again"),
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("names", STACKS)
def test_a10_stacked_interleaved_and_poisoned(names, n):
    plain = on_ranks(n, run_stack, names, n, False, True)
    poisoned = on_ranks(n, run_stack, names, n, True, True)
    for (worst, a), (worst_poisoned, b) in zip(plain, poisoned, strict=True):
        assert worst <= 1e-12 and worst_poisoned <= 1e-12
        assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def run_three_on_one_axis(n):
    """The public case: one scratch buffer under two column linears gives dW1 = 8 where 4 is right."""
    mesh = dense.mesh_of(tensor=n)
    layout = sw.GridLayout(n=("tensor",), x="sharded", save_x="shard")
    lins = [
        sw.GridLinear.from_dense(torch.nn.Linear(8, 8, bias=False, dtype=torch.float64), layout, mesh) for _ in range(2)
    ]
    ys = [lin(torch.full((4 // n, 8), float(i + 1), dtype=torch.float64)) for i, lin in enumerate(lins)]
    sum(y.sum() for y in ys).backward()
    return [lin.weight.grad.to_local() for lin in lins]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a10_no_shared_scratch(n):
    for first, second in on_ranks(n, run_three_on_one_axis, n):
        assert torch.equal(first, torch.full_like(first, 4.0))
        assert torch.equal(second, torch.full_like(second, 8.0))


def run_inference_then_training(name):
    mesh = dense.mesh_of(data=1, tensor=2)
    reference = torch.nn.Linear(K, N, bias=False, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(dense.random(N, K, seed=1))
    lin = sw.GridLinear.from_dense(reference, with_data(LAYOUTS[name]), mesh)
    x = dense.part(dense.random(T, K, seed=3), mesh, lin.input_placements)
    with torch.inference_mode():
        a = lin(x).clone()
    with torch.no_grad():
        b = lin(x).clone()
    x.requires_grad_()
    y = lin(x)
    y.backward(dense.part(dense.random(T, N, seed=4), mesh, lin.output_placements))
    up = dense.random(T, N, seed=4)
    dw = up.t() @ dense.random(T, K, seed=3)
    return torch.equal(a, y) and torch.equal(b, y), dense.error(lin.weight.grad.full_tensor(), dw)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a11_inference_then_training(name):
    for same, worst in on_ranks(2, run_inference_then_training, name):
        assert same and worst <= 1e-12


def run_views(name):
    """A transposed view, a sliced view, and other leading sizes give what the contiguous tensor gives."""
    mesh = dense.mesh_of(data=1, tensor=2)
    torch.manual_seed(0)
    lin = sw.GridLinear.from_dense(torch.nn.Linear(K, N, dtype=torch.float64), with_data(LAYOUTS[name]), mesh)
    x = dense.part(dense.random(T, K, seed=3), mesh, lin.input_placements)
    rows, width = x.shape
    y = lin(x)
    up = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    shapes, same = [], []
    for view in (
        x.t().contiguous().t(),
        torch.cat([x, x], 1)[:, :width],
        x.view(2, rows // 2, width),
        x.view(1, rows, width),
    ):
        view = view.detach().requires_grad_()
        out = lin(view)
        shapes.append(tuple(out.shape))
        same.append(dense.error(out.reshape(y.shape), y) < 1e-12)
        out.backward(up.view(out.shape).transpose(-1, -2).contiguous().transpose(-1, -2))
        same.append(view.grad.shape == view.shape)
    return shapes, tuple(y.shape), all(same)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a12_views_and_leading_sizes(name):
    for shapes, shape, same in on_ranks(2, run_views, name):
        assert same
        assert shapes == [shape, shape, (1, *shape), (1, *shape)]


def test_a12_axis_of_one_makes_no_collective_and_no_copy():
    for name in LAYOUTS:
        ((_, _, trace),) = on_ranks(1, run_linear, name, {"data": 1, "tensor": 1}, False)
        assert trace.collectives == ()
        peak = max(p.total for p in trace.peaks if p.phase == "forward")
        assert peak == (T * K + N * K + T * N) * 8


def run_odd(name, t, k, n, bias):
    """Nothing divides: errors against dense, saved bytes, collectives, and this rank's rows."""
    ranks = torch.distributed.get_world_size()
    mesh = dense.mesh_of(data=1, tensor=ranks)
    reference = torch.nn.Linear(k, n, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(dense.random(n, k, seed=1))
        if bias:
            reference.bias.copy_(dense.random(n, seed=2))
    lin = sw.GridLinear.from_dense(reference, with_data(LAYOUTS[name]), mesh)
    sw.Runtime.of(mesh).arena.poison = True
    x_whole, up = dense.random(t, k, seed=3), dense.random(t, n, seed=4)
    x = dense.part(x_whole, mesh, lin.input_placements).requires_grad_()
    gradient = dense.part(up, mesh, lin.output_placements)
    with sw.record(lin) as trace:
        y = lin(x, tokens=t)
        y.backward(gradient)
    x_whole.requires_grad_()
    out = reference(x_whole)
    out.backward(up)
    placements = [
        [p if not p.is_shard() else type(p)(p.dim + 2) for p in q]
        for q in (lin.output_placements, lin.input_placements)
    ]
    checks = [
        (y.detach(), out, placements[0]),
        (x.grad, x_whole.grad, placements[1]),
        (lin.weight.grad.to_local(), reference.weight.grad, lin.weight.placements),
    ]
    if bias:
        checks.append((lin.bias.grad.to_local(), reference.bias.grad, lin.bias.placements))
    worst = 0.0
    for local, whole, where in checks:
        expected = dense.cut(whole.detach(), mesh, where)
        assert local.shape == expected.shape
        if local.numel():
            worst = max(worst, dense.error(local, expected))
    sw.Runtime.of(mesh).arena.poison = False
    sent = [(c.kind, c.size, c.sent) for c in trace.collectives if c.axes == ("tensor",)]
    return worst, trace.saved_bytes, sent, x.shape


ODD = [(4, 12, 8, 10), (8, 3, 8, 16), (2, 7, 6, 10), (3, 1, 5, 7), (8, 9, 3, 5)]


@pytest.mark.parametrize(("ranks", "t", "k", "n"), ODD)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a12_sizes_that_do_not_divide(name, ranks, t, k, n):
    for rank, (worst, saved, sent, shape) in enumerate(on_ranks(ranks, run_odd, name, t, k, n, True)):
        assert worst <= 1e-12
        rows, width = shape
        if name == "column gather again":
            low, high = chunk(t, ranks, rank)
            assert rows == high - low and width == k
            assert saved == rows * k * 8
            whole, own = t * k * 8, rows * k * 8
            gather, scatter = ("all_gather", whole, own * (ranks - 1)), ("reduce_scatter", whole, whole - own)
            assert sent == [gather, gather, scatter]


def wrong_count():
    """4 rows here and 3 there are 7, not 8 and 6: a count that does not fit this rank's rows is refused."""
    mesh = dense.mesh_of(tensor=2)
    lin = sw.GridLinear.from_dense(torch.nn.Linear(4, 4), LAYOUTS["column keep"], mesh)
    with pytest.raises(ValueError, match="found a part of 4 rows; allowed: 5"):
        lin(torch.ones(4, 4), tokens=10)


def test_a12_a_count_that_does_not_fit_is_refused():
    on_ranks(2, wrong_count)


def unequal(name, parts):
    """What a linear says to as many rows as ``parts`` tell on this rank, call after call."""
    mesh = dense.mesh_of(tensor=2)
    lin = sw.GridLinear.from_dense(torch.nn.Linear(4, 4), LAYOUTS[name], mesh)
    width = 2 if LAYOUTS[name].k else 4
    told = []
    for rows in parts[mesh.get_rank()]:
        try:
            lin(torch.ones(rows, width))
            told.append("")
        except sw.InputError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("name", ["column keep", "row scatter", "row all-reduce", "column all-reduce"])
def test_unequal_rows_without_a_count_are_refused_on_every_rank(name):
    """gloo ended the process: "Received data size doesn't match expected size"."""
    calls = on_ranks(2, unequal, name, [(4, 4, 5, 4, 2), (3, 4, 5, 6, 2)])
    expected = [("4 rows on rank 0 and 3 on rank 1", "3 rows on rank 1 and 4 on rank 0"), None, None]
    expected += [("4 rows on rank 0 and 6 on rank 1", "6 rows on rank 1 and 4 on rank 0"), None]
    for rank, told in enumerate(calls):
        for line, want in zip(told, expected, strict=True):
            assert line.startswith(f"linear: found {want[rank]}; allowed: as many") if want else not line
            assert len(line) <= 300


@pytest.mark.parametrize("role", ["m", "n", "k"])
def test_an_axis_that_the_mesh_does_not_have_is_refused(role):
    """m with a misspelt axis was taken, and the gradient not reduced over it."""
    line = f"linear: layout.{role}: found 'tensr'; allowed: the mesh's axes (tensor)"
    plan = types.SimpleNamespace(mesh={"tensor": 1}, world_size=1, backend="gloo")
    with stage(plan, 0) as mesh, pytest.raises(sw.InputError) as caught:
        sw.GridLinear.from_dense(torch.nn.Linear(4, 4), sw.GridLayout(**{role: "tensr"}), mesh)
    assert str(caught.value) == line


def draw_and_check(draws):
    """Runs every draw; the errors come back so that all ranks stay in step."""
    answers = []
    for name, axes, t, k, n, bias, seed in draws:
        mesh = dense.mesh_of(**axes)
        layout = with_data(LAYOUTS[name])
        reference = torch.nn.Linear(k, n, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            reference.weight.copy_(dense.random(n, k, seed=seed))
            if bias:
                reference.bias.copy_(dense.random(n, seed=seed + 1))
        lin = sw.GridLinear.from_dense(reference, layout, mesh)
        x_whole, up = dense.random(t, k, seed=seed + 2), dense.random(t, n, seed=seed + 3)
        x = dense.part(x_whole, mesh, lin.input_placements).requires_grad_()
        y = lin(x)
        y.backward(dense.part(up, mesh, lin.output_placements))
        x_whole.requires_grad_()
        out = reference(x_whole)
        out.backward(up)
        worst = max(
            dense.error(dense.whole(y, mesh, lin.output_placements), out),
            dense.error(dense.whole(x.grad, mesh, lin.input_placements), x_whole.grad),
            dense.error(lin.weight.grad.full_tensor(), reference.weight.grad),
        )
        if bias:
            worst = max(worst, dense.error(lin.bias.grad.full_tensor(), reference.bias.grad))
        answers.append(worst)
    return answers


DRAW = st.tuples(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([{"data": 1, "tensor": 4}, {"data": 2, "tensor": 2}, {"data": 4, "tensor": 1}]),
    st.integers(1, 4).map(lambda i: 4 * i),
    st.integers(1, 6).map(lambda i: 4 * i),
    st.integers(1, 6).map(lambda i: 4 * i),
    st.booleans(),
    st.integers(0, 1000),
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(DRAW, min_size=1, max_size=5))
def test_any_shape_equals_dense(draws):
    for answers in on_ranks(4, draw_and_check, draws):
        assert max(answers) <= 1e-11
