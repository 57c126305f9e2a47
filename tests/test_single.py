"""One linear's fastest grid: one dimension where that is enough, more where it pays (ACCEPTANCE E7)."""

from __future__ import annotations

import pytest

from shardwright.errors import DoesNotFit
from shardwright.formulas.bounds import Grid
from shardwright.simulate.machine import Machine
from shardwright.spec.cluster import Cluster
from shardwright.spec.site import Linear, Site
from support.single import fastest_single, singles

GIB = 2**30


def linear(tokens: int, k: int, n: int) -> Site:
    return Site("linear", "column", tokens, k, (Linear("linear", n),))


def fastest(site: Site, devices: int, memory: int = 80 * GIB):
    return fastest_single(site, Cluster.named(f"{devices}xH100-80GB"), memory, "bfloat16", "nccl")


def test_a_tall_weight_and_few_tokens_want_one_dimension():
    found = fastest(linear(64, 256, 1_000_000), 8)
    assert (found.grid, found.dimensions) == (Grid(1, 8, 1), 1)


def test_seconds_are_those_of_the_products_and_of_what_travels():
    tokens, k, n = 64, 256, 512
    machine = Machine(Cluster.named("2xH100-80GB"), {"i": 1, "j": 2, "l": 1}, "bfloat16", "nccl")
    size = tokens * k * 2
    split = next(
        each
        for each in singles(linear(tokens, k, n), machine.cluster, "bfloat16", "nccl")
        if each.grid == Grid(1, 2, 1) and each.layout.x == "replicated"
    )
    dx = machine.collective("all_reduce", ("j",), size, size)
    assert split.seconds == pytest.approx(3 * machine.product(tokens, n // 2, k) + dx, rel=1e-12)


@pytest.mark.parametrize("tokens", [8, 64])
def test_wide_layers_on_many_ranks_with_few_tokens_a_rank_want_a_grid(tokens):
    site = linear(tokens * 512, 16_384, 65_536)
    found = fastest(site, 512)
    assert found.dimensions >= 2 and found.grid.k > 1
    flat = [each for each in singles(site, Cluster.named("512xH100-80GB"), "bfloat16", "nccl") if each.dimensions == 1]
    assert found.seconds < min(each.seconds for each in flat)


def test_a_budget_is_kept_and_an_impossible_one_names_the_least():
    site, cluster = linear(4096, 8192, 8192), Cluster.named("8xH100-80GB")
    every = list(singles(site, cluster, "bfloat16", "nccl"))
    least = min(each.memory for each in every)
    found = fastest(site, 8, memory=least)
    assert found.memory == least
    assert found.seconds == min(each.seconds for each in every if each.memory <= least)
    assert fastest(site, 8).seconds == min(each.seconds for each in every) <= found.seconds
    with pytest.raises(DoesNotFit, match=f"at least {least:,} "):
        fastest(site, 8, memory=least - 1)
