"""An overlap mode of the tests' own: blocking, and it counts how often it was used. Same signature as blocking.py."""

from __future__ import annotations

from shardwright.overlap import blocking

CALLS = {"forward": 0, "backward": 0}


def forward(work):
    CALLS["forward"] += 1
    return blocking.forward(work)


def backward(work):
    CALLS["backward"] += 1
    return blocking.backward(work)
