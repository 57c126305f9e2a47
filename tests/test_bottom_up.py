"""``sw.shard`` called on blocks and then on the module around them: one store, one schedule."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from support import dense
from support.nets import Chain
from support.ranks import on_ranks
from support.untidy import WORLD, mesh_of_all, message_of


class Net(nn.Module):
    def __init__(self, count=3, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(width, width)
        self.blocks = Chain(count, width, bias=True)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def bottom_up(model, inner=None, **outer):
    for block in model.blocks:
        sw.shard(block, mesh_of_all(), **(inner or {}))
    return sw.shard(model, mesh_of_all(), **outer)


def gathered(model):
    return [group.name for group in model.parameter_store.schedule.param_groups if group.gathered]


def three_steps(inner, outer):
    """The largest error of three steps' gradients against one rank's, and what is gathered after each forward."""
    model = Net()
    plain, left = copy.deepcopy(model), []
    bottom_up(model, inner, **outer)
    worst = 0.0
    for step in range(3):
        for rank in range(dist.get_world_size()):
            plain(dense.random(3, 8, seed=10 * step + rank).float()).square().sum().backward()
        y = model(dense.random(3, 8, seed=10 * step + dist.get_rank()).float())
        left.append(gathered(model))
        y.square().sum().backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            worst = max(worst, dense.error(parameter.grad.full_tensor(), expected.grad))
        model.zero_grad(), plain.zero_grad()
    return worst, left, gathered(model)


def test_blocks_do_not_stay_gathered_after_the_forward():
    """The head is a group of the outer call, and stays for its backward."""
    for worst, left, after in on_ranks(WORLD, three_steps, {}, {}):
        assert worst <= 1e-5 and left == [["head"]] * 3 and after == []


def test_inner_calls_have_levels_of_their_own():
    for worst, left, after in on_ranks(WORLD, three_steps, {"level": "gradients"}, {"in_flight": 1}):
        assert worst <= 1e-5 and set(left[0]) == {"head", "blocks.0", "blocks.1", "blocks.2"}
        assert set(after) == {"blocks.0", "blocks.1", "blocks.2"}


def one_schedule():
    model = bottom_up(Net(), {"in_flight": 1}, in_flight=3)
    groups = model.parameter_store.schedule.param_groups
    schedules = {id(stored.schedule) for group in groups for stored in group.members}
    with sw.no_sync(model.blocks[0]):  # of all
        model(torch.ones(2, 8)).sum().backward()
        partial = {parameter.grad.placements[0].is_partial() for parameter in model.parameters()}
    with torch.no_grad():
        model.blocks[0](torch.ones(2, 8))  # by itself
        alone = gathered(model)
        model(torch.ones(2, 8))
    names = sorted(group.name for group in groups)
    return len(schedules), partial, alone, gathered(model), names, model.parameter_store.schedule.in_flight


def test_all_calls_share_one_schedule():
    names = ["blocks.0", "blocks.1", "blocks.2", "enter", "head"]
    assert on_ranks(WORLD, one_schedule) == [(1, {True}, [], [], names, 3)] * WORLD


def refusals():
    tied = Net()
    tied.head.weight = tied.blocks[0].weight
    return [
        message_of(lambda: bottom_up(Net(), {"reduce": "mean"})),
        message_of(lambda: bottom_up(Net(), {"unused": "zeros"})),
        message_of(lambda: bottom_up(Net(), {"checks": False})),
        message_of(lambda: bottom_up(tied)),
        message_of(lambda: sw.shard(bottom_up(Net()), mesh_of_all())),
        message_of(lambda: sw.shard(Net(), mesh_of_all(), ignored_parameters=["nothing"])),
        message_of(lambda: sw.shard(Net(), mesh_of_all(), dtype=torch.bfloat16, mixed_precision=sw.MixedPrecision())),
    ]


def test_what_calls_cannot_state_differently_is_refused_by_name():
    words = ["reduce: found 'mean'", "unused: found 'zeros'", "checks: found False", "head.weight: found a parameter"]
    words += ["sharded already", "ignored_parameters: found 'nothing'", "mixed_precision: found beside"]
    for told in on_ranks(WORLD, refusals):
        for word, message in zip(words, told, strict=True):
            assert word in message


def ignored():
    model = Net()
    kept = model.enter.weight
    policy = sw.MixedPrecision(torch.bfloat16, torch.float32)
    sw.shard(model, mesh_of_all(), ignored_parameters=["head.bias", kept], mixed_precision=policy)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(model.blocks[0].weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.full((1, 8), 1.0 + dist.get_rank())).sum().backward()
    plain = [name for name, parameter in model.named_parameters() if type(parameter) is nn.Parameter]
    return model.enter.weight is kept, plain, model.head.bias.grad.tolist(), kept.grad is not None, seen


def test_ignored_parameters_stay_as_they_are():
    """Their gradients are this rank's alone: one row of ones."""
    for same, plain, grad, trains, seen in on_ranks(WORLD, ignored):
        assert same and sorted(plain) == ["enter.weight", "head.bias"] and grad == [1.0] * 8 and trains
        assert seen == [torch.bfloat16]


def blocks_alone():
    model = Chain(2, 8)
    for block in model:
        sw.shard(block, mesh_of_all())
    sw.shard(model, mesh_of_all())(torch.ones(1, 8))
    return gathered(model)


def test_a_last_block_does_not_stay_either():
    assert on_ranks(WORLD, blocks_alone) == [[]] * WORLD


def unsharded(level, keep):
    model = bottom_up(Net(), {"level": level, "keep": keep})
    plain, block = Net(), model.blocks[0]
    handle = model.blocks[1].unshard(async_op=True)
    block.unshard()
    handle.wait()
    seen = [
        torch.equal(inner.weight, plain.blocks[number].weight) for number, inner in enumerate(list(model.blocks)[:2])
    ]
    names = gathered(model)
    kinds = {type(parameter.data).__name__ for parameter in model.parameters()}
    gathers = counted_gathers(block, lambda: model(torch.ones(1, 8)).sum().backward())
    after = gathered(model)
    block.unshard()
    block.reshard()
    return seen, names, kinds, gathers, after, gathered(model), type(block.weight.data).__name__


def counted_gathers(module, run):
    """How often the module's group was gathered meanwhile."""
    (group,) = module._shard_root.param_groups
    count, start = [], group.start
    group.start = lambda mode: (count.append(mode), start(mode))
    run()
    del group.start
    return len(count)


def test_a_forward_after_unshard_gathers_nothing_again():
    """Backward does, where forward has released it."""
    for keep, expected in ((False, 1), (True, 0)):
        for seen, names, kinds, gathers, after, last, kind in on_ranks(WORLD, unsharded, "parameters", keep):
            assert seen == [True, True] and sorted(names) == ["blocks.0", "blocks.1"] and kinds == {"DTensor"}
            assert gathers == expected and after == last == [] and kind == "DTensor"


def prefetched():
    model = bottom_up(Net(), in_flight=2)
    first, second, third = model.blocks
    order = []
    for group in model.parameter_store.schedule.param_groups:
        start = group.start
        group.start = lambda mode, group=group, start=start: (order.append((group.name, mode)), start(mode))
    first.set_modules_to_forward_prefetch([second])
    third.set_modules_to_backward_prefetch([second])
    orders = []
    for _ in range(2):
        y = model(torch.ones(1, 8)).sum()
        orders.append([name for name, mode in order if mode == "async"])
        order.clear()
        y.backward()
        orders.append([name for name, mode in order if mode == "async"])
        order.clear()
    told = [
        message_of(lambda: first.set_modules_to_forward_prefetch([second, third])),
        message_of(lambda: model.set_modules_to_forward_prefetch([first])),
        message_of(lambda: first.set_modules_to_forward_prefetch([sw.shard(nn.Linear(2, 2), mesh_of_all())])),
    ]
    return orders, told, isinstance(first, nn.Linear) and isinstance(first, sw.ShardedModule), repr(first)


def test_stated_lists_replace_the_order_that_was_learnt():
    words = ["found 2 parameter groups ahead at in_flight 2", "found 2 parameter groups of Net", "sharded apart"]
    for orders, told, kind, text in on_ranks(WORLD, prefetched):
        assert orders == [["blocks.1"]] * 4 and kind and text.startswith("Linear(")
        assert all(word in message for word, message in zip(words, told, strict=True))
