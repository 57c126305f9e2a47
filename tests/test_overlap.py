"""The overlap modes: bits, bytes, order and transients (ACCEPTANCE A4–A7, A13, A14)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.trace import Collective, Op, Wait
from support import dense
from support.ranks import on_ranks

T, K, N = 48, 32, 64
MODES = ("blocking", "async", "ring")
COLUMN = sw.GridLayout(n="tensor", x="sharded")
KEEP = sw.GridLayout(n="tensor", x="sharded", save_x="gathered")
WHOLE = sw.GridLayout(n="tensor", x="replicated")
ROW = sw.GridLayout(k="tensor", y="sharded")
ROW_WHOLE = sw.GridLayout(k="tensor", y="replicated")
LAYOUTS = {"column": COLUMN, "keep": KEEP, "whole": WHOLE, "row": ROW, "row whole": ROW_WHOLE}


def change(layout: sw.GridLayout, **fields) -> sw.GridLayout:
    return sw.GridLayout(**{**layout.to_dict(), **fields})


def run(layout, n, dtype=torch.float64, sizes=(T, K, N), tokens=None, siblings=1, bias=True, poison=True):
    """Outputs, gradients and trace of one site, and its errors against dense float64."""
    t, k, width = sizes
    mesh = dense.mesh_of(tensor=n)
    references = [torch.nn.Linear(k, width, bias=bias, dtype=torch.float64) for _ in range(siblings)]
    for seed, reference in enumerate(references):
        with torch.no_grad():
            reference.weight.copy_(dense.random(width, k, seed=seed).to(dtype))
            if bias:
                reference.bias.copy_(dense.random(width, seed=10 + seed).to(dtype))
    linears = [torch.nn.Linear(k, width, bias=bias, dtype=dtype) for _ in range(siblings)]
    for linear, reference in zip(linears, references, strict=True):
        linear.load_state_dict(reference.state_dict())
    lins = sw.GridLinear.siblings(linears, layout, mesh)
    sw.Runtime.of(mesh).arena.poison = poison
    x_whole, up = dense.random(t, k, seed=20).to(dtype), dense.random(t, width, seed=21).to(dtype)
    x = dense.part(x_whole, mesh, lins[0].input_placements).requires_grad_()
    gradient = dense.part(up, mesh, lins[0].output_placements)
    with sw.record(*lins) as trace:
        ys = [lin(x, tokens=t if tokens else None) for lin in lins]
        torch.autograd.backward(ys, [gradient] * siblings)
    sw.Runtime.of(mesh).arena.poison = False
    assert sw.Runtime.of(mesh).arena.held == 0
    x64 = x_whole.double().requires_grad_()
    outs = [reference(x64) for reference in references]
    torch.autograd.backward(outs, [up.double()] * siblings)
    pairs = [
        *((y.detach(), out.detach(), lins[0].output_placements) for y, out in zip(ys, outs, strict=True)),
        (x.grad, x64.grad, lins[0].input_placements),
        *(
            (a.weight.grad.to_local(), b.weight.grad, a.weight.placements)
            for a, b in zip(lins, references, strict=True)
        ),
    ]
    if bias:
        pairs += [
            (a.bias.grad.to_local(), b.bias.grad, a.bias.placements) for a, b in zip(lins, references, strict=True)
        ]
    locals_, worst = [], 0.0
    for local, expected, placements in pairs:
        mine = dense.part(expected, mesh, placements)
        assert local.shape == mine.shape
        if local.numel():
            scale = max(1.0, expected.abs().max().item())
            worst = max(worst, dense.error(local.double(), mine) / scale)
        locals_.append(local.clone())
    return worst, locals_, trace


def logged(trace):
    return [(c.phase, c.kind, c.axes, c.size) for c in trace.collectives]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a4_modes_that_cut_alike_agree_bit_for_bit(name, n):
    for chunks in (1, 2, 3):
        answers = {
            mode: on_ranks(
                n, run, change(LAYOUTS[name], overlap=mode, chunks=chunks), n, torch.float32, (T, K, N), None, 2
            )
            for mode in MODES
        }
        for rank in range(n):
            worst, blocking, trace = answers["blocking"][rank]
            assert worst <= 1e-5
            for mode in ("async", "ring"):
                other_worst, other, other_trace = answers[mode][rank]
                assert all(torch.equal(a, b) for a, b in zip(blocking, other, strict=True)), (mode, chunks)
                assert sorted(logged(other_trace)) == sorted(logged(trace))
                assert sum(c.sent for c in other_trace.collectives) == sum(c.sent for c in trace.collectives)
                assert other_trace.saved_bytes == trace.saved_bytes
                assert other_worst <= 1e-5


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_mode_equals_dense(name, mode, n):
    for sizes in ((T, K, N), (7, 9, 11)):
        layout = change(LAYOUTS[name], overlap=mode)
        for worst, _, _ in on_ranks(n, run, layout, n, torch.float64, sizes, True, 3):
            assert worst <= 1e-12


@pytest.mark.parametrize("mode", ["async", "ring"])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a5_a_row_never_holds_the_unreduced_result(mode, n):
    t, k, m = 64, 32, 128
    layout = change(ROW, overlap=mode)
    for _, _, trace in on_ranks(n, run, layout, n, torch.float32, (t, k, m), None, 1, False):
        before = 4 * (t * k // n + m * k // n)  # x and W
        forward = max(p.total for p in trace.peaks if p.phase == "forward") - before
        assert forward <= 2 * t * m * 4 // n + t * m * 4 // n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a6_a_ring_column_never_holds_the_gathered_input(n):
    t, k, m = 64, 128, 32
    for _, _, trace in on_ranks(n, run, change(COLUMN, overlap="ring"), n, torch.float32, (t, k, m), None, 1, False):
        resident = 4 * (t * k // n + m * k // n)
        forward = max(p.total for p in trace.peaks if p.phase == "forward")
        assert forward <= resident + 4 * t * m // n + 2 * t * k * 4 // n
        backward = max(p.total for p in trace.peaks if p.phase == "backward")
        outputs = 4 * (t * m // n + t * k // n + m * k // n)  # dY, dX, dW
        # y is still held by the caller
        assert backward <= resident + 4 * t * m // n + outputs + 4 * t * k * 4 // n


REFERENCE = {2: (24, 36), 4: (12, 22), 8: (6, 11)}
MIB = 2**20


def reference_column(n):
    """The column linear of 2048 tokens, 1024 → 4096, fp32: MiB above parameters and x, forward and backward."""
    mesh = dense.mesh_of(tensor=n)
    lin = sw.GridLinear.from_dense(torch.nn.Linear(1024, 4096, bias=False), change(COLUMN, overlap="ring"), mesh)
    x = torch.randn(2048 // n, 1024, requires_grad=True)
    base = (x.numel() + lin.weight.to_local().numel()) * 4
    with sw.record(lin) as trace:
        y = lin(x)
        shape = y.shape
    forward = (trace.peak_bytes - base) / MIB
    gradient = torch.randn(shape)
    with sw.record(lin, gradient) as trace:
        y.backward(gradient)
        del y
    # The recording of backward starts without x and the saved shard; x enters when it is first used.
    return forward, (max(p.total - p.categories["parameter"] for p in trace.peaks) - x.numel() * 4) / MIB


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_reference_column_in_ring_mode_peaks_where_it_should(n):
    for forward, backward in on_ranks(n, reference_column, n):
        assert forward <= REFERENCE[n][0] and backward <= REFERENCE[n][1]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a7_issue_order_of_an_async_backward(n):
    """AG(X) issued before the dX product and waited for before RS(dX) is issued; nothing waits from there to dW."""
    for _, _, trace in on_ranks(n, run, change(COLUMN, overlap="async"), n, torch.float32, (T, K, N), None, 1, False):
        story = []
        for event in trace.events:
            if event.phase != "backward":
                continue
            if isinstance(event, Collective):
                story.append(("issue", event.kind))
            elif isinstance(event, Wait):
                story.append(("wait", event.kind))
            elif isinstance(event, Op) and event.name == "aten.mm.out":
                story.append(("product", "dx"))
            elif isinstance(event, Op) and event.name in ("aten.mm.default", "aten.addmm_.default"):
                story.append(("product", "dw"))
        first = {entry: story.index(entry) for entry in dict.fromkeys(story)}
        assert first["issue", "all_gather"] < first["product", "dx"]
        last_dx = max(i for i, entry in enumerate(story) if entry == ("product", "dx"))
        assert last_dx < first["wait", "all_gather"] < first["issue", "reduce_scatter"] < first["product", "dw"]
        between = story[first["issue", "reduce_scatter"] + 1 : first["product", "dw"]]
        assert between == []
        products = [i for i, entry in enumerate(story) if entry == ("product", "dw")]
        waits = [i for i, entry in enumerate(story) if entry == ("wait", "reduce_scatter")]
        assert len(waits) == n - 1 and all(i > products[0] for i in waits)
        assert ("wait", "all_gather") not in story[first["issue", "reduce_scatter"] :]


def test_async_forward_multiplies_its_own_part_before_it_waits():
    for _, _, trace in on_ranks(4, run, change(COLUMN, overlap="async"), 4, torch.float32, (T, K, N), None, 1, False):
        story = [e for e in trace.events if e.phase == "forward" and isinstance(e, (Wait, Collective, Op))]
        gather = next(i for i, e in enumerate(story) if isinstance(e, Collective))
        product = next(i for i, e in enumerate(story) if isinstance(e, Op) and e.name == "aten.mm.out")
        wait = next(i for i, e in enumerate(story) if isinstance(e, Wait))
        assert gather < product < wait


@pytest.mark.parametrize("mode", ["async", "ring"])
@pytest.mark.parametrize("name", ["column", "keep", "row"])
def test_frozen_weights_and_inputs(mode, name):
    for frozen in ("w", "x"):
        for worst, kinds, saved in on_ranks(4, frozen_run, change(LAYOUTS[name], overlap=mode), frozen):
            assert worst <= 1e-12
            if frozen == "w":
                assert saved == 0 and kinds.count("all_gather") == 1
            else:
                assert "reduce_scatter" not in (kinds if name != "row" else kinds[1:])


def frozen_run(layout, frozen):
    mesh = dense.mesh_of(tensor=4)
    reference = torch.nn.Linear(K, N, bias=False, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(dense.random(N, K, seed=0))
    lin = sw.GridLinear.from_dense(reference, layout, mesh)
    lin.weight.requires_grad_(frozen != "w")
    x = dense.part(dense.random(T, K, seed=1), mesh, lin.input_placements).requires_grad_(frozen != "x")
    up = dense.random(T, N, seed=2)
    with sw.record(lin) as trace:
        lin(x).backward(dense.part(up, mesh, lin.output_placements))
    if frozen == "w":
        worst = dense.error(x.grad, dense.part(up @ reference.weight.detach(), mesh, lin.input_placements))
    else:
        worst = dense.error(lin.weight.grad.full_tensor(), up.t() @ dense.random(T, K, seed=1))
    return worst, [c.kind for c in trace.collectives], trace.saved_bytes


def frobenius(layout, n):
    """Relative Frobenius errors of y and dX in bfloat16 against float64, over the whole tensors."""
    mesh = dense.mesh_of(tensor=n)
    t, k, m = 256, 512, 512
    w, x_whole, up = (dense.random(*shape, seed=i).bfloat16() for i, shape in enumerate([(m, k), (t, k), (t, m)]))
    linear = torch.nn.Linear(k, m, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(w)
    lin = sw.GridLinear.from_dense(linear, layout, mesh)
    x = dense.part(x_whole, mesh, lin.input_placements).requires_grad_()
    y = lin(x)
    y.backward(dense.part(up, mesh, lin.output_placements))
    errors = []
    for local, placements, exact in (
        (y, lin.output_placements, x_whole.double() @ w.double().t()),
        (x.grad, lin.input_placements, up.double() @ w.double()),
    ):
        got = dense.whole(local, mesh, placements).double()
        errors.append(((got - exact).norm() / exact.norm()).item())
    return max(errors)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("name", ["column", "row", "whole", "row whole"])
def test_a13_low_precision(name, n):
    for mode in MODES:
        assert max(on_ranks(n, frobenius, change(LAYOUTS[name], overlap=mode), n)) <= 1.1 * 2**-8
    for mode in ("blocking", "async"):
        layout = change(LAYOUTS[name], overlap=mode, reduce_dtype="float32")
        assert max(on_ranks(n, frobenius, layout, n)) <= 0.7 * 2**-8


def refused_ring():
    with pytest.raises(sw.InputError, match="reduce_dtype: found 'float32'; allowed: same with overlap: ring"):
        sw.GridLinear.from_dense(
            torch.nn.Linear(4, 4), change(COLUMN, overlap="ring", reduce_dtype="float32"), dense.mesh_of(tensor=2)
        )


def test_a_ring_cannot_widen_its_sums():
    on_ranks(2, refused_ring)


def recomputed(mode, n, save_x, again):
    """Gradients of an MLP 16–64–16 (column, row) with and without recomputation, and its collectives."""
    mesh = dense.mesh_of(tensor=n)
    sw.Runtime.of(mesh).arena.poison = True
    dense_linears = [torch.nn.Linear(16, 64, dtype=torch.float64), torch.nn.Linear(64, 16, dtype=torch.float64)]
    for seed, linear in enumerate(dense_linears):
        with torch.no_grad():
            linear.weight.copy_(dense.random(*linear.weight.shape, seed=seed))
            linear.bias.copy_(dense.random(*linear.bias.shape, seed=seed + 5))
    up = sw.GridLinear.from_dense(dense_linears[0], change(COLUMN, overlap=mode, save_x=save_x), mesh, "up")
    down = sw.GridLinear.from_dense(dense_linears[1], change(ROW, overlap=mode), mesh, "down")
    block = torch.nn.Sequential(up, torch.nn.GELU(), down)
    x = dense.part(dense.random(8 * n, 16, seed=9), mesh, up.input_placements).unsqueeze(0).requires_grad_()
    with sw.record(block) as trace:
        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        y.backward(dense.part(dense.random(8 * n, 16, seed=10), mesh, down.output_placements).unsqueeze(0))
    sw.Runtime.of(mesh).arena.poison = False
    grads = [x.grad, *(p.grad.to_local() for p in block.parameters())]
    held = sw.Runtime.of(mesh).arena.held
    return (
        [y.detach(), *(g.clone() for g in grads)],
        [c.kind for c in trace.collectives if "tensor" in c.axes],
        held,
        trace,
    )


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a14_recomputation(mode, n):
    for save_x in ("shard", "gathered"):
        plain = on_ranks(n, recomputed, mode, n, save_x, False)
        again = on_ranks(n, recomputed, mode, n, save_x, True)
        for (a, _, _, _), (b, kinds, held, _) in zip(plain, again, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
            assert held == 0
            assert kinds.count("all_gather") == (4 if mode == "ring" and save_x == "shard" else 3)
            assert kinds.count("reduce_scatter") == 2


def post_norm(mode):
    """A block that ends in a norm of the row's output: the replay needs the reduced value, and reduces."""
    mesh = dense.mesh_of(tensor=2)
    torch.manual_seed(0)
    up = sw.GridLinear.from_dense(torch.nn.Linear(16, 64, dtype=torch.float64), change(COLUMN, overlap=mode), mesh)
    down = sw.GridLinear.from_dense(torch.nn.Linear(64, 16, dtype=torch.float64), change(ROW, overlap=mode), mesh)
    block = torch.nn.Sequential(up, torch.nn.GELU(), down, torch.nn.LayerNorm(16, dtype=torch.float64))
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    kinds, grads = [], []
    for again in (False, True):
        x.grad = None
        with sw.record(block) as trace:
            (checkpoint(block, x, use_reentrant=False) if again else block(x)).square().sum().backward()
        kinds.append([c.kind for c in trace.collectives].count("reduce_scatter"))
        grads.append(x.grad.clone())
    return kinds, torch.equal(*grads)


@pytest.mark.parametrize("mode", MODES)
def test_a14_a_reduction_that_the_replay_needs_is_made(mode):
    for kinds, same in on_ranks(2, post_norm, mode):
        assert kinds == [2, 3] and same


def adapter(mode):
    """A frozen projection and a trainable LoRA A on the same input: one gather, and the shard is all that is saved."""
    mesh = dense.mesh_of(tensor=4)
    linears = [
        torch.nn.Linear(K, N, bias=False, dtype=torch.float64),
        torch.nn.Linear(K, 8, bias=False, dtype=torch.float64),
    ]
    for seed, linear in enumerate(linears):
        with torch.no_grad():
            linear.weight.copy_(dense.random(*linear.weight.shape, seed=seed))
    linears[0].weight.requires_grad_(False)
    frozen, lora = sw.GridLinear.siblings(linears, change(COLUMN, overlap=mode), mesh)
    holder = torch.nn.ModuleList([frozen, lora])
    x = dense.part(dense.random(T, K, seed=5), mesh, frozen.input_placements).requires_grad_()
    ups = [dense.random(T, width, seed=6) for width in (N, 8)]
    with sw.record(holder) as trace:
        ys = [frozen(x), lora(x)]
        torch.autograd.backward(ys, [dense.part(up, mesh, frozen.output_placements) for up in ups])
    dx = ups[0] @ linears[0].weight.detach() + ups[1] @ linears[1].weight.detach()
    worst = max(
        dense.error(x.grad, dense.part(dx, mesh, frozen.input_placements)),
        dense.error(lora.weight.grad.full_tensor(), ups[1].t() @ dense.random(T, K, seed=5)),
    )
    return worst, trace.saved_bytes, frozen.weight.grad, [c.kind for c in trace.collectives]


@pytest.mark.parametrize("mode", MODES)
def test_adapters_keep_shards_only(mode):
    for worst, saved, none, kinds in on_ranks(4, adapter, mode):
        assert worst <= 1e-11 and none is None
        assert saved == T * K * 8 // 4
        assert sorted(kinds) == ["all_gather", "all_gather", "reduce_scatter"]
