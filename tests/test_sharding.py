"""Anyone's module, stored by level: against dense float64, against DDP, in low precision, in any tree (C13–C16)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.params.schedule import InFlightError
from shardwright.spec.mesh import chunk
from shardwright.trace import Alloc
from shardwright.values.placement import cut
from support import dense
from support.marks import slow_at
from support.nets import (
    ALL,
    CASES,
    FEW,
    LEVELS,
    Case,
    Chain,
    Losses,
    batches_of,
    dense_gradients,
    fail,
    gradients_match,
    make,
    mesh_and_levels,
    worst,
)
from support.ranks import on_ranks


@pytest.mark.parametrize(
    ("axes", "names", "levels", "poison"),
    slow_at(
        (2, 5),
        [
            ({"data": 1}, FEW, ALL, False),
            ({"data": 2}, tuple(CASES), ALL, False),
            ({"data": 3}, tuple(CASES), ("parameters",), True),
            ({"data": 4}, FEW, ("gradients", "kept"), True),
            ({"data": 8}, ("everything",), ("parameters",), False),
            ({"replica": 2, "shard": 2}, FEW, ("optimizer", "gradients", "parameters", "kept"), False),
            ({"replica": 2, "shard": 4}, ("everything",), ("parameters",), False),
            ({"shard": 1, "replica": 2}, FEW[-1:], ("parameters",), False),
        ],
    ),
)
def test_gradients_equal_dense(axes, names, levels, poison):
    world = torch.Size(axes.values()).numel()
    for wrong in on_ranks(world, gradients_match, axes, names, levels, poison):
        assert wrong == {}


def after_three_steps(model, losses, optimizer, case, scale=1):
    """The parameters, whole, after three steps of which each differentiates ``scale`` times the losses."""
    for step in range(3):
        (scale * losses(batches_of(case, dist.get_rank(), step, torch.float32))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def steps_match(axes, names, levels):
    """{(case, level): largest difference} from DistributedDataParallel after three steps in fp32, above 1e-6."""
    mesh, words = mesh_and_levels(axes)
    wrong = {}
    for name in names:
        case = CASES[name]
        peer = make(case, torch.float32)
        losses = nn.parallel.DistributedDataParallel(Losses(peer, case), find_unused_parameters=case.unused)
        optimizer = torch.optim.AdamW(peer.parameters())
        # The peer's gradients are means over ranks, ours are sums.
        expected = after_three_steps(peer, losses, optimizer, case, dist.get_world_size())
        for level in levels:
            options = words[level] | {"groups": case.groups, "in_flight": case.in_flight}
            model = sw.shard(make(case, torch.float32), mesh, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            found = after_three_steps(model, Losses(model, case), optimizer, case)
            error = max(dense.error(found[key], expected[key]) for key in expected)
            if list(found) != list(expected) or not error <= 1e-6:
                wrong[name, level] = error
    return wrong


@pytest.mark.parametrize(
    ("axes", "names", "levels"),
    slow_at(
        (1, 3),
        [
            ({"data": 2}, tuple(CASES), ("parameters",)),
            ({"data": 2}, FEW, ("replicate", "optimizer", "gradients", "kept")),
            ({"data": 3}, FEW[1:2], ALL),
            ({"replica": 2, "shard": 2}, FEW[3:], ("optimizer", "parameters")),
        ],
    ),
)
def test_three_steps_equal_ddp(axes, names, levels):
    world = torch.Size(axes.values()).numel()
    for wrong in on_ranks(world, steps_match, axes, names, levels):
        assert wrong == {}


def modes_match(world):
    """Evaluation first and in between, graphs that are kept, aborted forwards and backwards: errors by level."""
    mesh = dense.mesh_of(data=world)
    arena = sw.Runtime.of(mesh).arena
    case = Case(unused=True)
    reference = dense_gradients(case, world)
    batches = batches_of(case, dist.get_rank(), 0, torch.float64)
    plain = make(case)(batches[0][0]).detach()
    errors = {}
    for level, words in LEVELS.items():
        model = sw.shard(make(case), mesh, **words)
        losses = Losses(model, case)

        def evaluate(model=model):
            found = []
            for context in (torch.no_grad, torch.inference_mode):
                model.eval()
                with context():
                    found.append(dense.error(model(batches[0][0]), plain))
                assert arena.held == 0
            model.train()
            return max(found)

        def train(model=model, losses=losses, times=1):
            model.zero_grad()
            loss = losses(batches)
            for left in reversed(range(times)):
                loss.backward(retain_graph=left > 0)
            assert arena.held == 0
            return max(worst(model, {k: g if g is None else times * g for k, g in reference.items()}).values())

        def abort(losses=losses):
            kept = []
            hook = losses.net.blocks[1].register_forward_hook(lambda _, __, y: kept.append(y.register_hook(fail)))
            with pytest.raises(ZeroDivisionError):
                losses(batches).backward()
            hook.remove()

        errors[level] = {
            "evaluation first": evaluate(),
            "training": train(),
            "evaluation between": evaluate(),
            "training again": train(),
            "graph kept": train(times=2),
        }
        abort()
        errors[level]["after an abort"] = train()
        hook = model.blocks[1].mlp.up.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            losses(batches)
        hook.remove()
        errors[level]["after an error in forward"] = train()
        abort()
        abort()
        errors[level]["after two"] = max(evaluate(), train())
        ends = []
        end = model.parameter_store.schedule._end_backward
        model.parameter_store.schedule._end_backward = lambda end=end, ends=ends: (ends.append(1), end())[1]
        abort()
        train()
        assert ends == [1], "the end of backward is heard of once"
    return errors


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_kept_graphs_and_aborted_backwards(world):
    for errors in on_ranks(world, modes_match, world):
        assert max(error for level in errors.values() for error in level.values()) <= 1e-12, errors


def refused(frozen):
    """What a reentrant checkpoint around a unit says, and the gradients' error of the step after it."""
    mesh = dense.mesh_of(data=dist.get_world_size())
    case = Case(frozen=("blocks.1",) if frozen else ())
    model = sw.shard(make(case), mesh)
    block, forward = model.blocks[1], model.blocks[1].forward
    losses, batches = Losses(model, case), batches_of(case, dist.get_rank(), 0, torch.float64)
    model.blocks[1] = _Reentrant(block)
    with pytest.raises(RuntimeError) as caught:
        losses(batches).backward()
    model.blocks[1] = block
    block.forward = forward
    model.zero_grad()
    losses(batches).backward()
    errors = worst(model, dense_gradients(case, dist.get_world_size()))
    with pytest.raises(RuntimeError, match="create_graph"):
        losses(batches).backward(create_graph=True)
    return str(caught.value).splitlines()[0], max(errors.values())


class _Reentrant(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_reentrant_checkpoint_is_refused_in_one_line(frozen):
    for message, error in on_ranks(2, refused, frozen):
        assert message == (
            "blocks.1: found a backward inside a backward, as of a checkpoint with use_reentrant=True; "
            "allowed: use_reentrant=False"
        )
        assert error <= 1e-12


# -- precision -------------------------------------------------------------------------------------------------------


def low_precision(axes, stored):
    """Whether gradients are the fp32 sums, in ring order, of the ranks' bf16 gradients; and the trace."""
    mesh, levels = mesh_and_levels(axes)
    options = {"dtype": torch.bfloat16} if stored == torch.float32 else {"reduce_dtype": torch.float32}
    model = sw.shard(Chain(1, dtype=stored), mesh, **(levels["parameters"] | options))
    world, shard = dist.get_world_size(), mesh.size(mesh.ndim - 1)
    inputs = [dense.random(5, 64, seed=place).bfloat16() for place in range(world)]
    upstream = [dense.random(5, 64, seed=100 + place).bfloat16() for place in range(world)]
    parts = []
    for x, up in zip(inputs, upstream, strict=True):
        plain = Chain(1, dtype=stored).bfloat16()
        plain(x).backward(up)
        parts.append(cut(plain[0].weight.grad, mesh, model[0].weight.placements))
    index, total = mesh.get_local_rank(mesh.ndim - 1), 0
    for replica in range(world // shard):
        ring = [parts[replica * shard + (index + step) % shard] for step in range(1, shard + 1)]
        total = total + sum((part.float() for part in ring[1:]), ring[0].float())
    rank = dist.get_rank()
    with sw.record(model) as trace:
        y = model(inputs[rank])
        y.backward(upstream[rank])
    gradient = model[0].weight.grad.to_local()
    return gradient.dtype == stored and torch.equal(gradient, total.to(stored)), trace


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 3}, {"data": 4}, {"replica": 2, "shard": 2}])
def test_bf16_gradients_are_added_up_in_fp32(axes, stored):
    """bf16 bytes travel, and no fp32 copy of the whole gradient is made."""
    shard = list(axes.values())[-1]
    for rank, (exact, trace) in enumerate(on_ranks(torch.Size(axes.values()).numel(), low_precision, axes, stored)):
        assert exact or (stored, "replica" in axes) == (torch.bfloat16, True)  # there the sum of sums is rounded twice
        start, stop = chunk(64, shard, rank % shard)
        own = stop - start
        travels = [(c.kind, c.size, c.sent) for c in trace.collectives if c.axes == (list(axes)[-1],)]
        assert travels == [
            ("all_gather", 64 * 64 * 2, own * 64 * 2 * (shard - 1)),
            ("reduce_scatter", 64 * 64 * 2, (64 - own) * 64 * 2),
        ]
        born = [trace.storages[e.storage] for e in trace.events if isinstance(e, Alloc) and e.phase == "backward"]
        assert max(s.bytes for s in born) < 64 * 64 * 4


# -- any module ------------------------------------------------------------------------------------------------------


def grow(tree):
    """Leaves are linears, each with a tanh; a list is a sequence."""
    if isinstance(tree, list):
        return nn.Sequential(*map(grow, tree))
    return nn.Sequential(nn.Linear(3, 3, bias=tree), nn.Tanh())


def any_module(tree, level, chosen, in_flight):
    """The gradients' largest error, or the message of an InFlightError; how deep units lie in each other."""
    torch.manual_seed(0)
    plain = grow(tree).double()
    names = [name for name, _ in plain.named_modules()]
    units = sorted({names[number % len(names)] for number in chosen}) or None
    model = sw.shard(
        copy.deepcopy(plain),
        dense.mesh_of(data=dist.get_world_size()),
        groups=units,
        in_flight=in_flight,
        **LEVELS[level],
    )
    deep = max(sum(name == unit or not unit or name.startswith(f"{unit}.") for unit in units or ()) for name in names)
    xs = [dense.random(2, 3, seed=place) for place in range(dist.get_world_size())]
    try:
        for _ in range(2):
            model.zero_grad()
            model(xs[dist.get_rank()]).square().sum().backward()
    except InFlightError as error:
        return str(error), deep
    plain(torch.cat(xs)).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(dense.error(a.grad.full_tensor(), b.grad) for a, b in pairs), deep


TREES = st.recursive(st.booleans(), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=6)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([1, 2, 3]),
    TREES,
    st.sampled_from(list(LEVELS)),
    st.lists(st.integers(0, 20), max_size=4),
    st.integers(1, 3),
)
def test_any_module_any_units(world, tree, level, chosen, in_flight):
    """Gradients equal dense; an InFlightError comes only where units lie deeper in each other than is stated."""
    for found, deep in on_ranks(world, any_module, tree, level, chosen, in_flight):
        if isinstance(found, str):
            assert deep > in_flight, found
        else:
            assert found <= 1e-12
