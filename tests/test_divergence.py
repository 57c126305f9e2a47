"""Ranks that do not issue the same collectives: each that waits names the first that differs, within the timeout."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.comm.divergence import KEPT, Account, Issued, LastIssued, diagnosis
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.runtime.runtime import Runtime
from support import dense, tiny
from support.nets import LEVELS, Chain
from support.ranks import drop, on_ranks

SECONDS = 1.6


def hurried(**axes):
    """A mesh for whose groups a short timeout was stated."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SECONDS)
    ranks = torch.arange(dist.get_world_size()).view(*axes.values())
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes), backend_override=(("gloo", options),) * len(axes))


def said(program, *args):
    """(what each rank's error says, that torch's is behind it, seconds until it came) of a program that diverges."""
    answers = on_ranks(args[0], _said, program, *args[1:])
    drop(args[0])
    return answers


def _said(program, *args):
    begun = [0.0]
    try:
        program(begun, *args)
    except sw.DivergenceError as error:
        return str(error), isinstance(error.__cause__, RuntimeError), time.monotonic() - begun[0]
    return "", True, 0.0


def assert_named(answers, pattern, silent=()):
    for rank, (text, caused, seconds) in enumerate(answers):
        if rank not in silent:
            assert re.search(pattern, text), f"rank {rank}: {text!r}"
            # the program's own work is in it, on a machine that others use too; torch's own timeout is half an hour
            assert caused and seconds <= SECONDS + 4, (rank, text, seconds)


# -- parameters stored by level, on a data axis ------------------------------------------------------------------------


def skips_a_micro_batch(begun, level, checks):
    """Rank 1 leaves out the second of two micro-batches; then a total is summed."""
    mesh, rank = hurried(data=4), dist.get_rank()
    words = LEVELS[level] | ({"checks": False} if not checks else {})
    model = sw.shard(Chain(3, 8), mesh, **words)
    begun[0] = time.monotonic()
    for number in range(2):
        if (rank, number) != (1, 1):
            model(torch.ones(2, 8)).sum().backward()
    all_reduce(torch.ones(1), Runtime.of(mesh).group(("data",)), "loss")


@pytest.mark.parametrize(
    ("level", "checks"),
    [("replicate", False), ("optimizer", False), ("gradients", False), ("parameters", False), ("parameters", True)],
)
def test_a_rank_that_skips_a_micro_batch_is_named(level, checks):
    answers = said(skips_a_micro_batch, 4, level, checks)
    kind = "all_gather" if level in ("parameters", "kept") else "(all_reduce|reduce_scatter|all_gather)"
    stated = r"(begins a (forward|backward)|gathers \w+ in \w+)"
    other = stated if checks else rf"issues {kind} over data of \d+ bytes \(\d[^)]*\)"
    assert_named(
        answers,
        rf"^collective \d+ of the group of ranks 0, 1, 2, 3: rank \d ({other}|issues all_reduce over data of 4 bytes "
        rf"\(loss\)), rank \d ({other}|issues (none but waits|all_reduce over data of 4 bytes \(loss\)))",
    )
    assert all("rank 1 " in text and "loss" in text for text, _, _ in answers)


# -- collectives of any axis -------------------------------------------------------------------------------------------


def adds_a_collective(begun, axis):
    """Rank 1 gathers once more than its peers on one of two axes."""
    mesh, rank = hurried(data=2, tensor=2), dist.get_rank()
    runtime = Runtime.of(mesh)
    data, tensor = runtime.group(("data",)), runtime.group(("tensor",))
    both = runtime.group(("data", "tensor"))
    begun[0] = time.monotonic()
    all_gather(torch.ones(3), torch.empty(6), data, "first")
    all_gather(torch.ones(3), torch.empty(6), tensor, "first")
    if rank == 1:
        all_gather(torch.ones(2), torch.empty(4), runtime.group((axis,)), "added")
    reduce_scatter(torch.ones(4), torch.empty(2), data, "second")
    reduce_scatter(torch.ones(4), torch.empty(2), tensor, "second")
    all_reduce(torch.ones(5), both, "third")


@pytest.mark.parametrize(("axis", "ranks", "peer"), [("data", "1, 3", 3), ("tensor", "0, 1", 0)])
def test_a_rank_that_adds_a_collective_is_named_on_either_axis(axis, ranks, peer):
    """Ranks of other groups hear of it too: they wait for one that waits."""
    added, second = (f"all_gather over {axis} of 16 bytes (added)", f"reduce_scatter over {axis} of 16 bytes (second)")
    words = {1: f"rank 1 issues {added}", peer: f"rank {peer} issues {second}"}
    first, last = (words[rank] for rank in sorted(words))
    answers = said(adds_a_collective, 4, axis)
    told = f"collective 1 of the group of ranks {ranks}: {first}, {last}. torch: "
    assert sum(text.startswith(told) for text, _, _ in answers) >= 2, answers
    assert_named(answers, rf"rank 1 (issues all_gather over {axis} of 16 bytes \(added\)|issues none but waits at)")


def sizes_differ(begun, kind):
    """gloo would end the process, or take the fewer bytes for all."""
    group = Runtime.of(hurried(data=2)).group(("data",))
    count = 3 if dist.get_rank() == 0 else 50_000
    begun[0] = time.monotonic()
    if kind == "all_reduce":
        all_reduce(torch.ones(count), group, "norm")
    else:
        all_gather(torch.ones(count), torch.empty(2 * count), group, "norm")


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_sizes_that_differ_are_named(kind):
    factor = 1 if kind == "all_reduce" else 2
    assert_named(
        said(sizes_differ, 2, kind),
        rf"collective 0 of the group of ranks 0, 1: rank 0 issues {kind} over data of {12 * factor} bytes \(norm\), "
        rf"rank 1 issues {kind} over data of {200_000 * factor:,} bytes \(norm\)",
    )


def equal_but_for_the_module(begun):
    """Two all-reduces in another order: equal sizes, so the sums would be mixed."""
    group = Runtime.of(hurried(data=2)).group(("data",))
    begun[0] = time.monotonic()
    for module in ("a", "b") if dist.get_rank() == 0 else ("b", "a"):
        all_reduce(torch.ones(4), group, module)


def test_an_order_that_differs_is_never_mixed():
    assert_named(
        said(equal_but_for_the_module, 2),
        r"collective 0 .*: rank 0 issues all_reduce over data of 16 bytes \(a\), rank 1 issues .* \(b\)",
    )


def never_comes(begun):
    group = Runtime.of(hurried(data=3)).group(("data",))
    begun[0] = time.monotonic()
    all_gather(torch.ones(1), torch.empty(3), group, "first")
    if dist.get_rank() == 1:
        time.sleep(SECONDS + 0.3)
    else:
        all_gather(torch.ones(1), torch.empty(3), group, "second")


def test_a_rank_that_is_not_heard_of_is_named():
    answers = said(never_comes, 3)
    told = r"collective 1 of the group of ranks 0, 1, 2: rank \d issues all_gather over data of 12 bytes \(second\), "
    assert_named(answers, told + "rank 1 did not come", silent=(1,))


# -- a parallelized model ----------------------------------------------------------------------------------------------


def a_llama_skips(begun, axes, layout):
    """Rank 1 leaves out the second micro-batch of a step of a parallelized model."""
    plan = tiny.plan_of(axes, layout)
    mesh = hurried(**axes)
    model = sw.parallelize(build_meta(load_config(tiny.config_path()), plan.stored_dtype), mesh, plan)
    ((ids, labels),) = tiny.batches(plan, 1, Runtime.of(mesh).group(plan.batch_axes).index)[0]
    begun[0] = time.monotonic()
    for number in range(2):
        if (dist.get_rank(), number) != (1, 1):
            model(
                input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=torch.tensor(10)
            ).loss.backward()
    all_reduce(torch.ones(1), Runtime.of(mesh).group(tuple(axes)), "the step's end")


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ({"data": 4}, "replicate"),
        ({"data": 1, "tensor": 4}, "sequence-parallel"),
        ({"data": 2, "tensor": 2}, "tensor-all-reduce"),
    ],
)
def test_a_llama_whose_rank_skips_a_micro_batch_names_it(axes, layout):
    answers = said(a_llama_skips, 4, axes, layout)
    assert_named(answers, r"collective \d+ of the group of ranks ")
    first = [text for text, _, _ in answers if "rank 1 " in text and "the step's end" in text]
    assert len(first) >= 2, answers


# -- timeouts ----------------------------------------------------------------------------------------------------------


def timeouts():
    """Of groups of a mesh for which nothing was stated but for the job, and of those that we make."""
    runtime = Runtime.of(dense.mesh_of(a=2, b=2, c=2))
    made = runtime.group(("a", "c"))
    own = made.process_group._get_backend(torch.device("cpu")).options._timeout
    hasty = Runtime.of(hurried(a=2, b=2, c=2)).group(("b", "c"))
    short = hasty.process_group._get_backend(torch.device("cpu")).options._timeout
    return [each.total_seconds() for each in (runtime.group(("b",)).timeout, made.timeout, own, hasty.timeout, short)]


def test_groups_take_the_stated_timeout():
    assert on_ranks(8, timeouts) == [[60.0, 60.0, 60.0, SECONDS, SECONDS]] * 8


# -- what accounts tell ------------------------------------------------------------------------------------------------


def account(*over, waits, number, stated=""):
    """over: (ranks, letters), each letter a collective of that module."""
    book = {}
    for ranks, letters in over:
        issued = LastIssued(ranks, book)
        for letter in letters:
            issued.add(Issued("all_gather", ("data",), 8, letter))
    return Account.from_json(Account.of(book, waits, number, stated).to_json())


def test_what_is_long_ago_is_no_difference():
    late, early = "x" * KEPT + "y", "z" + "x" * (KEPT - 1) + "y"
    two = {rank: account(((0, 1), letters), waits=(0, 1), number=KEPT) for rank, letters in enumerate((late, early))}
    assert diagnosis(0, two).endswith("issues all_gather over data of 8 bytes (y), as all ranks do, and it failed")


def test_ranks_that_wait_for_each_other_on_two_axes_are_both_named():
    accounts = {
        0: account(((0, 1), "a"), ((0, 1, 2), ""), waits=(0, 1), number=0),
        1: account(((0, 1), ""), ((0, 1, 2), "b"), waits=(0, 1, 2), number=0),
    }
    assert diagnosis(0, accounts | {2: accounts[1]}) == (
        "collective 0 of the group of ranks 0, 1, 2: rank 1 issues all_gather over data of 8 bytes (b), rank 0 issues "
        "none but waits at collective 0 of ranks 0, 1, where it issues all_gather over data of 8 bytes (a)"
    )


def test_more_that_joins_a_collective_is_counted_with_it():
    issued = LastIssued((0, 1))
    numbers = [issued.add(Issued("all_gather", ("data",), 8, "a")) for _ in range(KEPT + 2)]
    issued.grow(numbers[-2], 24)
    issued.grow(numbers[0], 24)  # forgotten already
    assert [each.size for each in issued.recent].count(24) == 1 and issued.recent[-2].size == 24
