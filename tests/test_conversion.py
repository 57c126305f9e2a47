"""Conversions on edges against the whole tensor on every rank: values, gradients, collectives and bytes."""

from __future__ import annotations

import pytest

import dense
import grids
import shardwright as sw
from ranks import on_ranks
from shardwright.cost import Move, conversion_moves
from shardwright.linear.conversion import Conversion
from shardwright.linear.product import activation_placements
from shardwright.site import Step, conversion

AXES = {"i": 2, "j": 2, "l": 2}
ORDER = tuple(AXES)
EDGES = {
    "gather": ((("i", "j"), ("l",)), (("i",), ("l",))),
    "slice": ((("i",), ("l",)), (("i", "j"), ("l",))),
    "to features": ((("i", "l"), ("j",)), (("i",), ("j", "l"))),
    "to tokens": ((("i",), ("j", "l")), (("i", "l"), ("j",))),
    "two axes": ((("i", "j", "l"), ()), (("i",), ())),
    "behind one that stays": ((("i", "j", "l"), ()), (("i", "j"), ("l",))),
}


def convert(name, tokens, features):
    """(errors of value and gradient, counted and told moves) of one conversion on this rank."""
    left, taken = EDGES[name]
    mesh = dense.mesh_of(**AXES)
    whole, up = dense.random(tokens, features, seed=1), dense.random(tokens, features, seed=2)
    source, target = (activation_placements(*split, mesh) for split in (left, taken))
    x = dense.part(whole, mesh, source).requires_grad_()
    steps = conversion(left, taken, ("i",), ORDER)
    rows = -(-tokens // 2) if mesh.get_local_rank("i") == 0 else tokens // 2
    with sw.record(x) as trace:
        y = Conversion(steps, sw.Runtime.of(mesh), "edge")(x, rows)
        y.backward(dense.part(up, mesh, target))
    pairs = [(y.detach(), dense.part(whole, mesh, target)), (x.grad, dense.part(up, mesh, source))]
    here = dict(zip(ORDER, mesh.get_coordinate(), strict=True))
    told = conversion_moves(steps, rows, x.shape[1], AXES, here, 8)
    counted = [
        tuple(Move(c.kind, c.axes, c.size, c.sent) for c in trace.collectives if c.phase == phase)
        for phase in ("forward", "backward")
    ]
    return grids.largest(pairs), counted, list(told)


@pytest.mark.parametrize("name", EDGES)
def test_values_gradients_and_bytes(name):
    for tokens, features in ((16, 24), (13, 24)):
        for error, counted, told in on_ranks(8, convert, name, tokens, features):
            assert error == 0
            assert counted == told


def test_an_exchange_moves_less_than_a_gather():
    place = dict.fromkeys(AXES, 0)
    exchange, _ = conversion_moves([Step("to-features", ("l",))], 64, 32, AXES, place, 1)
    gather, _ = conversion_moves([Step("gather", ("l",))], 64, 32, AXES, place, 1)
    assert sum(move.sent for move in exchange) * 2 == sum(move.sent for move in gather)


@pytest.mark.parametrize(
    ("left", "taken"),
    [
        ((("i",), ("j",)), (("i",), ())),  # features that nobody splits any more
        ((("j",), ()), (("i",), ())),  # m does not split tokens before
        ((("i", "j", "l"), ()), (("i", "l"), ("j",))),  # j is cut before l, which stays
    ],
)
def test_what_cannot_be_converted(left, taken):
    assert conversion(left, taken, ("i",), ORDER) is None


def test_bits_of_a_conversion_and_back():
    there = conversion(*EDGES["to features"], ("i",), ORDER)
    assert there == (Step("to-features", ("l",)),)
    assert conversion(*reversed(EDGES["to features"]), ("i",), ORDER) == (Step("to-tokens", ("l",)),)
    assert conversion(EDGES["gather"][0], EDGES["gather"][0], ("i",), ORDER) == ()
