"""The store of parameters under untidy programs: right gradients, or one error that names what and who.

Each case is one that users met; its right value stands in the test.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from support import dense
from support.nets import LEVELS
from support.ranks import on_ranks
from support.untidy import SPLIT, WORLD, Block, mesh_of_all, message_of, sharded

# -- ranks that use different modules --------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two 1×1 linears, of which rank r uses number r."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x):
        expert = (self.first, self.second)[dist.get_rank()]
        return expert(x)


def expert_gradients(level, units):
    torch.manual_seed(0)
    model = sharded(Experts(), level, unused="zeros", groups=units)
    found = []
    for _ in range(3):  # the second and third backward know an order
        model(torch.tensor([[10.0 ** (1 + dist.get_rank())]])).sum().backward()
        found.append([parameter.grad.full_tensor().item() for parameter in model.parameters()])
        model.zero_grad()
    return found


@pytest.mark.parametrize("level", [name for name in LEVELS if name not in ("parameters", "kept")])
def test_what_a_rank_does_not_use_has_a_gradient_of_zero(level):
    """Inputs 10 and 100: gradients 10 and 100 (they were 110 and 110)."""
    assert on_ranks(WORLD, expert_gradients, level, None) == [[[10.0, 100.0]] * 3] * WORLD


@pytest.mark.parametrize("level", ["parameters", "kept"])
def test_what_a_rank_does_not_use_inside_a_group_that_all_enter(level):
    assert on_ranks(WORLD, expert_gradients, level, [""]) == [[[10.0, 100.0]] * 3] * WORLD


def expert_error(level, **options):
    model = sharded(Experts(), level, **options)
    return message_of(lambda: model(torch.ones(1, 1)).sum().backward())


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_that_use_different_modules_are_told(level):
    for told in on_ranks(WORLD, expert_error, level):
        assert told.startswith("DivergenceError") and "rank 0" in told and "rank 1" in told
        assert "first" in told or "second" in told


def test_a_group_that_a_rank_does_not_enter_is_refused_at_parameters():
    for told in on_ranks(WORLD, expert_error, "parameters"):
        assert "rank 0 gathers first in forward; rank 1 gathers second in forward" in told


class Depth(nn.Module):
    """Blocks, some of which a rank leaves out."""

    def __init__(self, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(width, width)

    def forward(self, x, left_out=()):
        for number, block in enumerate(self.blocks):
            if number not in left_out:
                x = x + block(x)
        return self.head(x)


def depth_errors(level):
    torch.manual_seed(0)
    plain = Depth().double()
    model = sharded(copy.deepcopy(plain), level, unused="zeros")
    worst = 0.0
    left = {0: (), 1: (1,), 2: (0, 3)}
    for step in range(3):
        reference = {name: torch.zeros_like(value) for name, value in plain.named_parameters()}
        for rank in range(dist.get_world_size()):
            plain.zero_grad()
            x = dense.random(5, 6, seed=10 * step + rank)
            (plain(x, left[(rank + step) % 3]) * x).sum().backward()
            for name, value in plain.named_parameters():
                reference[name] += 0 if value.grad is None else value.grad
        x = dense.random(5, 6, seed=10 * step + dist.get_rank())
        (model(x, left[(dist.get_rank() + step) % 3]) * x).sum().backward()
        for name, value in model.named_parameters():
            worst = max(worst, dense.error(value.grad.full_tensor(), reference[name]))
        model.zero_grad()
    return worst


@pytest.mark.parametrize("level", ["replicate", "optimizer", "gradients"])
def test_stochastic_depth_that_differs_between_ranks(level):
    assert max(on_ranks(3, depth_errors, level)) <= 1e-12


# -- W beside its shard is never stale -------------------------------------------------------------------------------


def after_writing(level, how):
    torch.manual_seed(0)
    model = sharded(nn.Linear(4, 4, bias=False), level)
    x = torch.ones(2, 4)
    first = model(x).abs().max().item()
    weight = model.weight
    with torch.no_grad():
        {
            "zero_": lambda: weight.zero_(),
            "copy_": lambda: weight.copy_(weight * 0),
            "data": lambda: weight.data.zero_(),
            "detach": lambda: weight.detach().mul_(0),
            "foreach": lambda: torch._foreach_mul_([weight.data], 0.0),
            "to_local": lambda: weight.to_local().zero_(),
            "state": lambda: model.load_state_dict({"weight": weight * 0}),
        }[how]()
    second = model(x).abs().max().item()
    with torch.no_grad():
        third = model(x).abs().max().item()
    return first > 0.1, second, third


@pytest.mark.parametrize("how", ["zero_", "copy_", "data", "detach", "foreach", "to_local", "state"])
@pytest.mark.parametrize("level", LEVELS)
def test_weights_written_between_two_forwards(level, how):
    """The second forward is 0 (it was 1.21)."""
    assert on_ranks(WORLD, after_writing, level, how) == [(True, 0.0, 0.0)] * WORLD


def halving(level):
    torch.manual_seed(0)
    model = sharded(nn.Linear(4, 4, bias=False), level)
    found = []
    with torch.no_grad():
        for _ in range(3):
            found.append(model(torch.ones(1, 4)).sum().item())
            model.weight.data.mul_(0.5)
    return found[1] * 2 - found[0], found[2] * 4 - found[0]


@pytest.mark.parametrize("level", SPLIT)
def test_weights_halved_between_evaluations(level):
    assert on_ranks(WORLD, halving, level) == [(0.0, 0.0)] * WORLD


def modified_before_backward(level, foreach):
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), level)
    y = model(torch.ones(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        if foreach:
            torch._foreach_mul_([model[2].weight], 2.0)
        else:
            model[2].weight.add_(1)
    return message_of(y.backward)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_modified_between_forward_and_backward_raises(level, foreach):
    for told in on_ranks(WORLD, modified_before_backward, level, foreach):
        assert "modified between its forward and its backward" in told


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return x * self.scale, x


@dataclass
class Batch:
    """What nobody looks into: the module's inputs are not seen to have gradients."""

    x: torch.Tensor


def two_outputs(level, optimizer, seen):
    model = sharded(TwoOutputs(), level)
    if optimizer == "ours":
        from shardwright.step.train_step import FusedAdamW

        chosen = FusedAdamW(model.parameters(), lr=0.1)
    else:
        chosen = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((4,), 0.5, requires_grad=True)
    for _ in range(2):
        y, same = model({"x": x * 1} if seen else Batch(x * 1))
        (y.sum() + same.square().sum()).backward()
        chosen.step()
        chosen.zero_grad()
    used = model(Batch(torch.ones(4)))[0]
    return (used - model.scale.full_tensor()).abs().max().item(), (model.scale.full_tensor() - 1).abs().min().item()


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("optimizer", ["ours", "torch's"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_second_output_leaves_no_stale_weight(level, optimizer, seen):
    """The next forward uses what is stored (it used 1.0000)."""
    for off, moved in on_ranks(WORLD, two_outputs, level, optimizer, seen):
        assert off == 0.0 and moved > 0.05


# -- gradients that were accumulated ---------------------------------------------------------------------------------


def discarded(level, how):
    model = sharded(nn.Linear(1, 1, bias=False), level)

    def backward(x, broken=False):
        y = model(torch.full((1, 1), x))
        if broken:
            y.register_hook(fail)
        y.sum().backward()

    with sw.no_sync(model):
        backward(1000.0)
        accumulated = model.weight.grad.placements
        if how == "an exception in backward":
            with pytest.raises(ZeroDivisionError):
                backward(1000.0, broken=True)
    if how == "an exception that ends no_sync":
        with pytest.raises(ZeroDivisionError), sw.no_sync(model):
            backward(1000.0)
            fail()
    if how == "zero_grad of the model":
        model.zero_grad()
    elif how == "zero_grad to zeros":
        model.zero_grad(set_to_none=False)
    elif how == "zero_grad of an optimizer":
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    elif how == "zeros of an optimizer":
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)
    elif how == "discard_accumulated":
        sw.discard_accumulated(model)
    backward(1.0)
    return model.weight.grad.full_tensor().item(), accumulated[0].is_partial()


def fail(*_):
    raise ZeroDivisionError


HOW = [
    "zero_grad of the model",
    "zero_grad to zeros",
    "zero_grad of an optimizer",
    "zeros of an optimizer",
    "discard_accumulated",
]


@pytest.mark.parametrize("how", [*HOW, "an exception in backward", "an exception that ends no_sync"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_discarded_micro_batch_counts_for_nothing(level, how):
    """A backward with 1000 in no_sync, discarded, then one with 1 on two ranks: 2 (it was 2002)."""
    assert on_ranks(WORLD, discarded, level, how) == [(2.0, True)] * WORLD


def mixed(level):
    """Reduced, accumulated, reduced: all three count; clipping and stepping in between are refused."""
    model = sharded(nn.Linear(3, 5, bias=False), level)
    x = [dense.random(2, 3, seed=seed).float() for seed in range(3)]
    model(x[0]).sum().backward()
    with sw.no_sync(model):
        model(x[1]).sum().backward()
    refused = message_of(sw.clip_grad_norm_, model.parameters(), 1.0)
    model(x[2]).sum().backward()
    expected = dist.get_world_size() * sum(x).sum(0).expand(5, 3)
    return (model.weight.grad.full_tensor() - expected).abs().max().item(), refused


@pytest.mark.parametrize("level", LEVELS)
def test_reduced_and_accumulated_gradients_add_up(level):
    for error, refused in on_ranks(WORLD, mixed, level):
        assert error <= 1e-5 and "no_sync" in refused


def means(level):
    """Means of what two ranks have, over a backward that reduces, two that accumulate, and one that reduces again."""
    model = sharded(nn.Linear(3, 5, bias=False), level, reduce="mean")
    x = [[dense.random(2, 3, seed=10 * rank + seed).float() for seed in range(4)] for rank in range(WORLD)]
    mine = x[dist.get_rank()]
    model(mine[0]).sum().backward()
    with sw.no_sync(model):
        model(mine[1]).sum().backward()
        model(mine[2]).sum().backward()
    model(mine[3]).sum().backward()
    expected = sum(sum(each) for each in x).sum(0).expand(5, 3) / WORLD
    return (model.weight.grad.full_tensor() - expected).abs().max().item()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_means_where_that_is_asked_for(level):
    assert max(on_ranks(WORLD, means, level)) <= 1e-5


# -- gradients that come in beside the output -------------------------------------------------------------------------


@dataclass
class Output:
    hidden: torch.Tensor
    extra: list


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return Output(x, [block.aux for block in self.blocks])


def side_losses(level, kind, first):
    torch.manual_seed(0)
    plain = Net().double()
    model = sharded(copy.deepcopy(plain), level, in_flight=3)
    mesh = mesh_of_all()
    sw.Runtime.of(mesh).arena.poison = True

    def loss(net, rank):
        x = dense.random(4, 6, seed=rank)
        out = net(x)
        side = sum(out.extra) if kind == "dataclass" else sum(block.aux for block in net.blocks)
        return side + (out.hidden * x).sum() if first else side

    try:
        worst = 0.0
        for _ in range(2):
            plain.zero_grad()
            for rank in range(dist.get_world_size()):
                loss(plain, rank).backward()
            loss(model, dist.get_rank()).backward()
            for name, value in model.named_parameters():
                expected = dict(plain.named_parameters())[name].grad
                worst = max(worst, dense.error(value.grad.full_tensor(), expected))
            model.zero_grad()
    finally:
        sw.Runtime.of(mesh).arena.poison = False
    return worst


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["attribute", "dataclass"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_beside_the_output(level, kind, first):
    """Right gradients (it was a segmentation fault), also where nothing flows through the output."""
    assert max(on_ranks(WORLD, side_losses, level, kind, first)) <= 1e-12
