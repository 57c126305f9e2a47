"""Grids of real ranks against dense float64: numbers, collectives, bytes (ACCEPTANCE A14–A19, A21)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.formulas.volume import site_volume
from shardwright.overlap.product import check_supported
from shardwright.spec.site import Linear, Site
from shardwright.values.initial import Unfilled
from support import counting, dense, grids
from support.grids import EVEN, GRIDS, UNEVEN, named, world
from support.ranks import drop, on_ranks

CUBE = {"i": 3, "j": 3, "l": 3}
TINY = (27, 54, 27)


def faces(layout, axes, sizes):
    """Bytes in float64 of X gathered, W gathered, Y unreduced on one rank (a, b, c of THEORY)."""
    (m, k, n), e = sizes, 8

    def over(*roles):
        return torch.Size([axes[axis] for role in roles for axis in role]).numel()

    return (
        m * k * e // over(layout.m, layout.k),
        n * k * e // over(layout.n, layout.k),
        m * n * e // over(layout.m, layout.n),
    )


def stated(name, layout, axes, sizes):
    """(the collectives, the bytes saved) of one site.

    Design 1: AG(X), AG(W), RS(Y); AG(dY), RS(dX), RS(dW), and AG(X), AG(W) again. Design 2: AR(Y), AR(dX).
    """
    a, b, c = faces(layout, axes, sizes)
    (m,), (n,) = layout.m, layout.n
    if name == "grid-scatter":
        expected = [
            ("forward", "all_gather", layout.m, b),
            ("forward", "all_gather", layout.n, a),
            ("forward", "reduce_scatter", layout.k, c),
            ("backward", "all_gather", layout.m, b),
            ("backward", "all_gather", layout.k, c),
            ("backward", "reduce_scatter", layout.n, a),
            ("backward", "all_gather", layout.n, a),
            ("backward", "reduce_scatter", layout.m, b),
        ]
        if axes[m] == 1:  # W is whole, so X need not wait until dX has gone
            expected[5:7] = expected[6:4:-1]
        saved = a // axes[n]
    else:
        expected = [
            ("forward", "all_gather", layout.m, b),
            ("forward", "all_reduce", layout.k, c),
            ("backward", "all_gather", layout.m, b),
            ("backward", "all_reduce", layout.n, a),
            ("backward", "reduce_scatter", layout.m, b),
        ]
        saved = a
    return [move for move in expected if axes[move[2][0]] > 1], saved


def counted(layout, axes, sizes):
    """On a rank: (error, collectives, whether each sends what it must, bytes saved)."""
    error, _, trace = grids.run(layout, axes, sizes, False, 1, 3, True)
    sent = []
    for move in trace.collectives:
        parts = torch.Size([axes[axis] for axis in move.axes]).numel()
        sent.append(move.sent == move.size * (parts - 1) // parts * (2 if move.kind == "all_reduce" else 1))
    return error, grids.logged(trace), all(sent), trace.saved_bytes


@pytest.mark.parametrize("axes", GRIDS, ids=named)
@pytest.mark.parametrize("kind", grids.KINDS)
@pytest.mark.parametrize("name", grids.DESIGNS)
def test_a15_a16_a19_equals_dense_and_counts(name, kind, axes):
    layout = grids.layout_of(name, kind)
    expected, saved = stated(name, layout, axes, EVEN)
    for answer in on_ranks(world(axes), counted, layout, axes, EVEN):
        assert answer[0] <= 1e-12 and answer[1:] == (expected, True, saved)


def on_a_cube(layouts):
    """On a rank of 27: for each layout what `counted` and `transients` tell, of tiny shapes."""
    return [(counted(layout, CUBE, TINY), transients(layout, CUBE, TINY)) for layout in layouts]


def test_a15_a16_a17_on_27_ranks():
    made = [(name, grids.layout_of(name, kind)) for name in grids.DESIGNS for kind in grids.KINDS]
    answers = on_ranks(27, on_a_cube, [layout for _, layout in made])
    drop(27)  # no other test needs so many
    for answer in answers:
        for (name, layout), (counts, held) in zip(made, answer, strict=True):
            expected, saved = stated(name, layout, CUBE, TINY)
            assert counts[0] <= 1e-12 and counts[1:] == (expected, True, saved)
            if name == "grid-scatter":
                assert_three_faces(held, layout, CUBE, TINY)


@pytest.mark.parametrize("axes", GRIDS, ids=named)
@pytest.mark.parametrize("name", grids.DESIGNS)
def test_uneven_sizes_siblings_and_biases(name, axes):
    for kind in grids.KINDS:
        layout = grids.layout_of(name, kind)
        for error, _, _ in on_ranks(world(axes), grids.run, layout, axes, UNEVEN, True, 2, 2, True):
            assert error <= 1e-12


@pytest.mark.parametrize("name", grids.DESIGNS)
def test_a15_a_bias_is_one_reduction(name):
    axes = GRIDS[0]
    for kind in grids.KINDS:
        layout = grids.layout_of(name, kind)
        over = tuple(axis for axis in axes if axis in layout.output_token_axes)
        for error, _, trace in on_ranks(8, grids.run, layout, axes, EVEN, True):
            assert error <= 1e-12
            small = [move[1:] for move in grids.logged(trace) if move[3] < 1000]
            assert small == [("all_reduce", over, EVEN[2] * 8 // axes[layout.n[0]])]
            assert len(trace.collectives) == (9 if name == "grid-scatter" else 6)


@pytest.mark.parametrize("kind", grids.KINDS)
@pytest.mark.parametrize("name", grids.DESIGNS)
def test_a15_kept_operands_are_gathered_once(name, kind):
    axes = GRIDS[0]
    again = on_ranks(8, grids.run, grids.layout_of(name, kind), axes, EVEN)
    layout = grids.layout_of(name, kind, save_x="gathered", save_w="gathered")
    a, b, _ = faces(layout, axes, EVEN)
    for (_, plain, _), (error, results, trace) in zip(again, on_ranks(8, grids.run, layout, axes, EVEN), strict=True):
        assert error <= 1e-12
        gathers = [(phase, axes, size) for phase, kind, axes, size in grids.logged(trace) if kind == "all_gather"]
        forward = [("forward", layout.m, b)] + [("forward", layout.n, a)] * (name == "grid-scatter")
        assert gathers[: len(forward)] == forward
        assert [phase for phase, *_ in gathers].count("backward") == (name == "grid-scatter")  # dY
        assert trace.saved_bytes == a
        assert all(torch.equal(one, other) for one, other in zip(plain, results, strict=True))


def transients(layout, axes, sizes):
    """(saved, the most alive in forward and backward beyond what lives before and after them) on this rank."""
    error, _, trace = grids.run(layout, axes, sizes)
    return error, trace.saved_bytes, [counting.transient(trace, phase) for phase in ("forward", "backward")]


def assert_three_faces(held, layout, axes, sizes):
    """Saved 1/P of X and nothing of W; blocking needs a + b + c: scratch comes when the others are gone."""
    a, b, c = faces(layout, axes, sizes)
    error, saved, (forward, backward) = held
    assert error <= 1e-12
    assert saved == a // axes["i"]
    assert forward <= a + b + c
    assert backward <= a + b + c


def test_a17_shards_are_kept_and_the_transient_is_three_faces():
    for kind in grids.KINDS:
        layout = grids.layout_of("grid-scatter", kind)
        for held in on_ranks(8, transients, layout, GRIDS[0], EVEN):
            assert_three_faces(held, layout, GRIDS[0], EVEN)


FLAT = [
    ("grid-2d", {"i": 2, "j": 2}),
    ("grid-2d", {"i": 2, "j": 3}),
    ("grid-25d", {"i": 2, "d": 2, "j": 2}),
    ("grid-25d", {"i": 1, "d": 2, "j": 2}),
]


@pytest.mark.parametrize(("name", "axes"), FLAT)
def test_a19_2d_and_25d(name, axes):
    """AG(X) along features and AG(W); RS(dX), RS(dW), and dW all-reduced over the axis on which W is whole."""
    layout = grids.layout_of(name, "column")
    a, b, _ = faces(layout, axes, EVEN)
    expected = [
        ("forward", "all_gather", ("i",), b),
        ("forward", "all_gather", ("j",), a),
        ("backward", "all_gather", ("i",), b),
        ("backward", "reduce_scatter", ("j",), a),
        ("backward", "all_gather", ("j",), a),
        ("backward", "reduce_scatter", ("i",), b),
    ]
    if axes["i"] == 1:
        expected[3:5] = expected[4:2:-1]
    expected = [move for move in expected if axes[move[2][0]] > 1]
    if "d" in axes:
        expected.append(("backward", "all_reduce", ("d",) if axes["i"] > 1 else layout.m, b // axes["i"]))
    for error, _, trace in on_ranks(world(axes), grids.run, layout, axes, EVEN, False, 1, 3, True):
        assert error <= 1e-12
        assert grids.logged(trace) == expected
        assert trace.saved_bytes == a // axes["j"]
    for error, _, _ in on_ranks(world(axes), grids.run, layout, axes, UNEVEN, True, 2, 2, True):
        assert error <= 1e-12


OTHERS = {
    "several axes a role": sw.GridLayout(n=("i", "j"), k="l"),
    "several axes split k": sw.GridLayout(m="i", k=("j", "l"), w="sharded"),
    "words by axis": sw.GridLayout(n=("i", "j"), k="l", x={"i": "replicated", "j": "sharded"}, y="replicated"),
    "words of y by axis": sw.GridLayout(n="i", k=("j", "l"), y={"j": "sharded", "l": "replicated"}),
    "features out": sw.GridLayout(m="i", n="j", k="l", x="replicated", w="sharded", y="sharded-features"),
    "features of X over j": sw.GridLayout(n=("j", "l"), k="i", x={"j": "sharded-features", "l": "replicated"}),
    "hybrid": sw.GridLayout(m=("i", "j"), n="l", w={"i": "sharded", "j": "replicated"}),
    "all of storage": sw.GridLayout(m=("i", "j", "l"), w="sharded"),
    "idle axes": sw.GridLayout(m="j", w="sharded"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_roles_words_and_idle_axes(name):
    for axes in (GRIDS[0], GRIDS[1]):
        for overlap in ("blocking", "async", "ring"):
            layout = sw.GridLayout(**{**OTHERS[name].to_dict(), "overlap": overlap})
            for error, _, _ in on_ranks(8, grids.run, layout, axes, UNEVEN, True, 2, 2, True):
                assert error <= 1e-12


def replayed(overlap, norm):
    """Collectives and gradients of design 1's MLP, with and without recomputation; norm: its end needs Y's value."""
    mesh, answers = dense.mesh_of(**GRIDS[0]), []
    torch.manual_seed(0)
    shapes = (("column", 16, 64), ("row", 64, 16))
    up, down = (
        sw.GridLinear.from_dense(
            torch.nn.Linear(k, n, dtype=torch.float64), grids.layout_of("grid-scatter", kind, overlap=overlap), mesh
        )
        for kind, k, n in shapes
    )
    block = torch.nn.Sequential(up, torch.nn.GELU(), down, *([torch.nn.GELU()] if norm else []))
    arena = sw.Runtime.of(mesh).arena
    arena.poison = True
    for again in (False, True):
        block.zero_grad()
        x = dense.part(dense.random(64, 16, seed=9), mesh, up.input_placements).requires_grad_()
        with sw.record(block) as trace:
            y = checkpoint(block, x, use_reentrant=False) if again else block(x)
            y.square().sum().backward()
        moves = Counter((c.kind, c.axes) for c in trace.collectives if c.size > 1000)
        grads = [x.grad, *(parameter.grad.to_local().clone() for parameter in block.parameters())]
        answers.append((moves, grads))
    arena.poison = False
    return answers, arena.held


@pytest.mark.parametrize("norm", [False, True])
def test_a14_a_replay_stops_before_y_is_reduced(norm):
    """Async as blocking: what the replay gathers of X, backward takes. A ring keeps nothing, and gathers again."""
    counts = {}
    for overlap in ("blocking", "async", "ring"):
        for ((plain, a), (again, b)), held in on_ranks(8, replayed, overlap, norm):
            assert held == 0
            assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
            scatters = {move: count for move, count in (again - plain).items() if move[0] == "reduce_scatter"}
            assert sum(scatters.values()) == (2 if norm else 1)  # up's Y, for GELU; down's only if it is needed
            counts.setdefault(overlap, []).append(again)
    assert counts["async"] == counts["blocking"]
    for ring, other in zip(counts["ring"], counts["blocking"], strict=True):
        gathers = [(move, count) for move, count in (ring - other).items()]
        assert sum(count for _, count in gathers) == (2 if norm else 1) and not other - ring


def in_any_order(order, axes):
    """Two models whose sites are built in the given and in another order: outputs and gradients are the same."""
    mesh, found = dense.mesh_of(**axes), []
    kinds = {"q": "column", "k": "column", "v": "column", "o": "row", "up": "column", "down": "row"}
    models = [{}, {}]
    for lins, names in zip(models, (order, sorted(order)), strict=True):
        for name in names:
            reference = torch.nn.Linear(24, 24, dtype=torch.float64)
            for parameter in reference.parameters():
                parameter.data.copy_(dense.random(*parameter.shape, seed=ord(name[0]) + parameter.dim()))
            lins[name] = sw.GridLinear.from_dense(reference, grids.layout_of("grid-scatter", kinds[name]), mesh)
    for lins in models:
        x = dense.part(dense.random(16, 24, seed=1), mesh, lins["q"].input_placements).requires_grad_()
        hidden = lins["o"](lins["q"](x) * lins["k"](x) + lins["v"](x))
        y = lins["down"](lins["up"](x + hidden))
        y.sum().backward()
        found.append([y.detach(), x.grad, *(lins[name].weight.grad.to_local() for name in sorted(lins))])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a18_layouts_are_explicit():
    assert all(on_ranks(8, in_any_order, ("v", "down", "q", "o", "up", "k"), GRIDS[0]))


def test_a21_one_sequence_is_split_over_the_grid():
    """Batch 1, sequence 64; and a batch of 3 × 21: tokens are flat, so what does not divide falls to the sequence."""
    layout = grids.layout_of("grid-scatter", "column")
    for tokens in (64, 3 * 21):
        answers = on_ranks(8, grids.run, layout, GRIDS[0], (tokens, 24, 32), False, 1, 3)
        assert max(error for error, _, _ in answers) <= 1e-12
        assert sum(results[0].shape[-2] for _, results, _ in answers) == 2 * tokens  # once for each half of K


def test_what_a_mesh_cannot_cut_is_refused():
    sizes = {"i": 2, "j": 2, "l": 2}
    mixed = {"i": "sharded", "j": "sharded-features"}
    for layout, words in (
        (sw.GridLayout(m="l", n="j"), r"layout.m: found \['l'\]; allowed: axes that come before j in the mesh"),
        (
            sw.GridLayout(n="i", k="l", x="sharded-features"),
            r"layout.k: found \['l'\]; allowed: axes that come before i",
        ),
        (sw.GridLayout(n=("i", "j"), x=mixed), "sharded or sharded-features, not both"),
    ):
        with pytest.raises(sw.InputError, match=words) as caught:
            check_supported(layout, sizes, "site")
        assert "\n" not in str(caught.value)


def wide_layer(layout, axes):
    """(peak, what must be there, one gathered tile of each operand and the scratch) of rank 0, rehearsed."""
    m, k, n = 64, 256, 1_000_000
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        sw.Runtime.of(mesh)
        with torch.device("meta"):
            reference = torch.nn.Linear(k, n, bias=False)
        with FakeTensorMode():
            source = Unfilled(torch.device("cpu"))
            (lin,) = sw.GridLinear.siblings([reference], layout, mesh, source=source)
            shape = lin.site.product.shape_in(m // axes["i"], lin.site.width)
            x = torch.empty(shape, requires_grad=True)
            with sw.record(lin, x) as trace:
                y = lin(x)
                y.backward(torch.empty_like(y))
    finally:
        torch.distributed.destroy_process_group()
    held = 2 * (lin.weight.to_local().nbytes + x.nbytes + y.nbytes)
    site = Site("", "column", m, k, (Linear("", n),))
    volume = site_volume(site, layout, axes, dict.fromkeys(axes, 0), element=4)
    return trace.peak_bytes, held, max(volume.transient_forward, volume.transient_backward)


@pytest.mark.parametrize("name", grids.DESIGNS)
def test_a_wide_layer_holds_its_shard_and_one_tile(name):
    """256 → 1,000,000 in fp32, 64 tokens, 8 ranks: shards and their gradients, beside what the formula states."""
    layout = grids.layout_of(name, "column")
    a, b, c = (face // 2 for face in faces(layout, GRIDS[0], (64, 256, 1_000_000)))
    peak, held, transient = wide_layer(layout, GRIDS[0])
    assert peak <= held + transient
    assert transient <= a + b + c + max(a, b, c)
