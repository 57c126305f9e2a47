"""Levels by the names of other systems, in ``sw.shard``, in a plan's ``params`` and on the command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.demo.wanted import Wanted
from shardwright.errors import InputError
from shardwright.space.request import asked
from shardwright.spec.layout import GridLayout
from shardwright.spec.plan import Plan
from shardwright.spec.sharding import Sharding
from shardwright.unsharding.mixed_precision import MixedPrecision
from shardwright.unsharding.shard import _sharding
from support import tiny
from test_cli import refused

NAMES = {
    "ddp": "replicate", "ZeRO-1": "optimizer", "zero1": "optimizer", "zero-2": "gradients", "ZERO-3": "parameters",
    "zero3": "parameters", "FSDP": "parameters",
}  # fmt: skip


def sharding(axes: tuple[str, ...], level: Any, keep: bool = False, reshard: bool | None = None) -> Sharding:
    mesh: Any = SimpleNamespace(mesh_dim_names=axes)
    return _sharding(mesh, level, (keep, reshard), MixedPrecision(), 0)


def plan(axes: dict[str, int], stored: Any) -> Plan:
    return tiny.plan_of({**axes, "tensor": 1}, GridLayout(m=tuple(axes)), params={"*": stored})


def test_shard_knows_them():
    assert {name: sharding(("data",), name).level for name in NAMES} == NAMES
    assert sharding(("a", "b"), {"a": "ddp", "b": "fsdp"}) == Sharding("parameters", ("b",))
    assert sharding(("a", "b"), "hsdp") == Sharding("parameters", ("b",))
    with pytest.raises(InputError, match="level: found 'hsdp' on 1 data axis; allowed: two data axes or more"):
        sharding(("data",), "hsdp")
    assert [sharding(("data",), "fsdp", reshard=after).keep for after in (None, True, False)] == [False, False, True]
    with pytest.raises(InputError, match="reshard_after_forward: found it beside keep"):
        sharding(("data",), "fsdp", True, True)
    with pytest.raises(InputError, match="reshard_after_forward: found it at level 'gradients'; allowed: level 'par"):
        sharding(("data",), "ZeRO-2", reshard=False)


def test_a_plan_knows_them_and_states_the_levels():
    assert {name: plan({"data": 2}, name).params["*"].level for name in NAMES} == NAMES
    hybrid = plan({"a": 2, "b": 2}, "hsdp")
    assert hybrid == plan({"a": 2, "b": 2}, {"level": "parameters", "axes": ["b"]})
    assert plan({"a": 2, "b": 2}, {"level": "hsdp", "axes": "a"}).sharding_for("x").axes == ("a",)
    with pytest.raises(InputError, match=r"'hsdp' on 1 data axis; allowed: two"):
        plan({"data": 2}, "hsdp")
    for after in (True, False):
        stored = plan({"data": 2}, {"level": "fsdp", "reshard_after_forward": after}).params["*"]
        assert (stored.level, stored.keep) == ("parameters", not after)
    with pytest.raises(InputError, match="reshard_after_forward: found it beside keep; allowed: one of them"):
        plan({"data": 2}, {"level": "fsdp", "keep": True, "reshard_after_forward": True})


def test_the_command_line_knows_them():
    path = tiny.config_path()
    ask = asked(path, "1xH100-80GB", None, 1, 8, "float32", None, "gloo", "ZeRO-3")
    assert ask.level == "parameters" and Wanted(2, None, 4, 0, "ddp").level == "replicate"
    words = ("rehearse", path, "--layout", "replicate", "--mesh", "data=2", "--micro-batch", "2", "--sequence", "8")
    assert "'hsdp' on 1 data axis" in refused(*words, "--level", "hsdp")
    with pytest.raises(InputError, match="level: found 'hsdp', which chooses axes too; allowed: replicate"):
        asked(path, "1xH100-80GB", None, 1, 8, "float32", None, "gloo", "hsdp")
