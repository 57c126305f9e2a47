"""Conversions on edges against the whole tensor on every rank: values, gradients, collectives and bytes."""

from __future__ import annotations

import itertools

import pytest

import shardwright as sw
from shardwright.formulas.conversion import conversion_moves
from shardwright.formulas.place import Move
from shardwright.overlap.product import activation_placements
from shardwright.reshard.conversion import Conversion
from shardwright.spec.edge import Step, conversion
from support import dense, grids
from support.ranks import on_ranks

AXES = {"i": 2, "j": 2, "l": 2}
EDGES = {
    "gather": ((("i", "j"), ("l",)), (("i",), ("l",))),
    "slice": ((("i",), ("l",)), (("i", "j"), ("l",))),
    "to features": ((("i", "l"), ("j",)), (("i",), ("j", "l"))),
    "to tokens": ((("i",), ("j", "l")), (("i", "l"), ("j",))),
    "two axes": ((("i", "j", "l"), ()), (("i",), ())),
    "behind one that stays": ((("i", "j", "l"), ()), (("i", "j"), ("l",))),
    "gather features": ((("i",), ("j", "l")), (("i",), ("j",))),
    "slice features": ((("i", "j"), ()), (("i", "j"), ("l",))),
    "features to others": ((("i",), ("j",)), (("i",), ("l",))),
    "before one that stays": ((("i", "j", "l"), ()), (("i", "l"), ("j",))),
    "both swapped": ((("i", "j"), ("l",)), (("i", "l"), ("j",))),
}


def convert(name, tokens, features):
    """(errors of value and gradient, counted and told moves) of one conversion on this rank."""
    left, taken = EDGES[name]
    mesh = dense.mesh_of(**AXES)
    whole, up = dense.random(tokens, features, seed=1), dense.random(tokens, features, seed=2)
    source, target = (activation_placements(*split, mesh) for split in (left, taken))
    x = dense.part(whole, mesh, source).requires_grad_()
    steps = conversion(left, taken, ("i",), AXES)
    rows = -(-tokens // 2) if mesh.get_local_rank("i") == 0 else tokens // 2
    with sw.record(x) as trace:
        y = Conversion(steps, sw.Runtime.of(mesh), features, "edge")(x, rows)
        y.backward(dense.part(up, mesh, target))
    assert y.is_contiguous()
    pairs = [(y.detach(), dense.part(whole, mesh, target)), (x.grad, dense.part(up, mesh, source))]
    here = dict(zip(AXES, mesh.get_coordinate(), strict=True))
    told = conversion_moves(steps, rows, features, AXES, here, 8)
    counted = [
        tuple(Move(c.kind, c.axes, c.size, c.sent) for c in trace.collectives if c.phase == phase)
        for phase in ("forward", "backward")
    ]
    return grids.largest(pairs), counted, list(told)


@pytest.mark.parametrize("name", EDGES)
def test_values_gradients_and_bytes(name):
    for tokens, features in ((16, 24), (13, 22)):
        for error, counted, told in on_ranks(8, convert, name, tokens, features):
            assert error == 0
            assert counted == told


def sent(steps):
    moves = conversion_moves(steps, 64, 32, AXES, dict.fromkeys(AXES, 0), 1)
    return sum(move.sent for move in moves[0] + moves[1])


def test_an_exchange_moves_less_than_a_gather_and_a_slice():
    exchange = sent([Step("to-features", ("l",))])
    assert exchange == sent([Step("gather", ("l",)), Step("slice-features", ("l",))]) // 2


@pytest.mark.parametrize(
    ("left", "taken", "kinds"),
    [
        (*EDGES["to features"], ["to-features"]),
        (*reversed(EDGES["to features"]), ["to-tokens"]),
        (*EDGES["gather features"], ["gather-features"]),
        (*reversed(EDGES["gather features"]), ["slice-features"]),
        (*EDGES["two axes"], ["gather"]),
        (EDGES["gather"][0], EDGES["gather"][0], []),
    ],
)
def test_the_steps_of_an_edge(left, taken, kinds):
    assert [step.kind for step in conversion(left, taken, ("i",), AXES)] == kinds


def every_split():
    for roles in itertools.product("tf-", repeat=2):
        axes = dict(zip(("j", "l"), roles, strict=True))
        yield (
            ("i", *(axis for axis in axes if axes[axis] == "t")),
            tuple(axis for axis in axes if axes[axis] == "f"),
        )


def test_every_edge_has_a_conversion_and_none_is_dearer_than_gathering_all():
    for left, taken in itertools.product(every_split(), repeat=2):
        steps = conversion(left, taken, ("i",), AXES)
        naive = []
        tokens, features = left[0][1:], left[1]
        if tokens:
            naive.append(Step("gather", tokens, (), features))
        if features:
            naive.append(Step("gather-features", features))
        if taken[0][1:]:
            naive.append(Step("slice", taken[0][1:]))
        if taken[1]:
            naive.append(Step("slice-features", taken[1], taken[0][1:]))
        assert sent(steps) <= sent(naive), (left, taken)
