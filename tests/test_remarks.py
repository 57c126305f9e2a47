"""What could not be applied is listed, and nothing else is; what may not go as it is meant is warned of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.families.table import family_of
from shardwright.models.config import load_config
from shardwright.models.remarks import not_applied, warnings_of
from shardwright.spec.plan import Plan
from shardwright.spec.presets import presets
from support import tiny
from test_cli import run

TENSOR, GRID = {"data": 1, "tensor": 2}, {"i": 1, "j": 2, "l": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sequence-parallel-async": (TENSOR, {}),
    "sequence-parallel-ring": (TENSOR, {}),
    "sequence-parallel-keep": (TENSOR, {"overlap": "async"}),
    "tensor-all-reduce": (TENSOR, {"overlap": "ring"}),
    "replicate": ({"data": 2}, {"overlap": "async"}),
    "grid-scatter": (GRID, {"overlap": "async"}),
    "grid-scatter, kept": (GRID, {"overlap": "async", "save_x": "gathered"}),
    "grid-reduce": (GRID, {"overlap": "async"}),
    "grid-2d": ({"i": 1, "j": 2}, {"overlap": "ring"}),
}


def plan_of(name: str) -> Plan:
    """The preset with changes, said of each site."""
    mesh, changes = LAYOUTS[name]
    plan = tiny.plan_of(mesh, name.partition(",")[0])
    sites = family_of(load_config(plan.config_path)).sites(load_config(plan.config_path), 1)
    layouts = {site.name: replace(presets[name.partition(",")[0]](site), **changes) for site in sites}
    return plan.evolve(layouts=layouts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_overlap_is_said_not_to_be_applied_just_where_collectives_are_blocking(name: str) -> None:
    """By the rehearsal: each collective of a site's X and Y says how it runs."""
    plan = plan_of(name)
    config = load_config(plan.config_path)
    trace = sw.rehearse(config, plan, steps=1)
    said = {place for each in not_applied(config, plan) if each.setting.startswith("overlap") for place in each.where}
    names = [site.name for site in family_of(config).sites(config, 1)]
    starred = {name: name.replace(".0.", ".*.").replace(".1.", ".*.") for name in names}
    stated = {starred[name]: plan.layouts[name].overlap for name in names}  # type: ignore[union-attr]
    as_stated, otherwise = set[str](), set[str]()
    for event in trace.collectives:
        if event.module in starred and event.kind != "all_to_all" and not {"data", "i"} & {*event.axes}:
            site = starred[event.module]
            (as_stated if event.mode == stated[site] else otherwise).add(site)
    silent = {site for site in stated if site not in as_stated | otherwise}
    assert otherwise <= said  # what runs in another mode than stated is said to
    assert said <= otherwise | silent  # and so is no other site, but those that have nothing to overlap


def test_other_settings_that_do_nothing() -> None:
    plan = tiny.plan_of({"data": 1, "tensor": 2}, "sequence-parallel-keep").evolve(
        layouts={
            "*": sw.GridLayout(m="data", n="tensor", x="replicated", save_x="gathered", save_w="gathered", chunks=2)
        },
        params={"model.layers.*": {"level": "parameters", "reduce_dtype": "float64"}, "*": "optimizer"},
        bucket="1MiB",
        in_flight=3,
    )
    told = {(each.setting, each.where, each.because) for each in not_applied(load_config(plan.config_path), plan)}
    every = ("model.embed_tokens", "model.layers.*.self_attn.qkv", "model.layers.*.self_attn.o")
    every = (*every, "model.layers.*.mlp.gate_up", "model.layers.*.mlp.down", "lm_head")
    assert told == {
        ("save_x: gathered", every, "its X is not gathered"),
        ("save_w: gathered", every, "its W is not gathered"),
        ("chunks: 2", every, "none of its operands travels in pieces of tokens"),
        ("level: parameters", ("model.layers.*",), "the axes (data) have one rank"),
        ("level: optimizer", ("*",), "the axes (data) have one rank"),
        ("reduce_dtype: float64", ("model.layers.*",), "no other rank has a share of its gradients"),
        ("bucket: 1048576", ("*",), "no gradient travels: one rank has all data"),
        ("in_flight: 3", ("*",), "no parameter group is gathered in its turn"),
    }


def test_a_plan_whose_settings_all_apply_has_no_remarks() -> None:
    plan = tiny.plan_of({"data": 2, "tensor": 2}, "sequence-parallel", params={"*": "parameters"}, bucket="1MiB")
    config = load_config(plan.config_path)
    assert not_applied(config, plan) == [] == warnings_of(config, plan, 1e-4)


@pytest.mark.parametrize(("stored", "rate", "warned"), [
    ("bfloat16", 1e-4, True), ("bfloat16", 1.9e-3, True), ("bfloat16", 2e-3, False), ("float32", 1e-4, False),
])  # fmt: skip
def test_updates_that_vanish_are_warned_of(stored: str, rate: float, warned: bool) -> None:
    """1 − 2⁻⁹ is the first bfloat16 step of 1 downward that is rounded to 1: less is no step at all."""
    import torch

    plan = tiny.plan_of({"data": 1, "tensor": 1}, "replicate", dtype="bfloat16", master_dtype=stored)
    lines = warnings_of(load_config(plan.config_path), plan, rate)
    assert bool(lines) == warned and all(line.startswith("master_dtype: ") and len(line) <= 300 for line in lines)
    weight = torch.ones(1, dtype=getattr(torch, stored))
    assert (weight - rate == weight).item() == warned


def test_rehearse_tells_what_is_not_applied_and_warns(tmp_path: Path) -> None:
    plan = plan_of("tensor-all-reduce").evolve(sequence=65, micro_batch=1)
    plan.save(tmp_path / "plan.yaml")
    status, output, errors = run("rehearse", tmp_path / "plan.yaml", "--json", tmp_path / "figures.json")
    assert status == 0
    told = json.loads((tmp_path / "figures.json").read_text())["not_applied"]
    assert {"setting", "where", "because"} == set(told[0]) and len(told) >= 3
    for each in told:
        line = f"not applied: {each['setting']} ({', '.join(each['where'])}), because {each['because']}"
        assert line in output
    assert errors.startswith("warning: sequence: 65 tokens are more than the 64")
