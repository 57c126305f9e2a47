"""Modules that know nothing of us, for tests of what stores them: cases, their dense gradients, recorded steps."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.params.schedule import Schedule
from shardwright.step.train_step import FusedAdamW
from shardwright.trace import Alloc, Free, span
from shardwright.values.placement import cut
from support import dense

LEVELS = {
    "replicate": {"level": "replicate"},
    "optimizer": {"level": "optimizer"},
    "gradients": {"level": "gradients"},
    "parameters": {"level": "parameters"},
    "kept": {"level": "parameters", "keep": True},
}
VOCAB, WIDTH, INNER = 11, 6, 7  # nothing divides by 2, 3, 4 and 8 at once


@dataclass(frozen=True)
class Case:
    """A model and the way it is run."""

    groups: tuple[str, ...] | None = None
    in_flight: int = 2
    tied: bool = False
    frozen: tuple[str, ...] = ()
    adapters: bool = False
    unused: bool = False
    forwards: int = 1
    again: bool = False
    recompute: str = ""
    detached: bool = False


CASES = {
    "root split into units": Case(),
    "root kept": Case(groups=("blocks.*", "")),
    "one unit": Case(groups=("",)),
    "nested units": Case(groups=("blocks.*", "blocks.*.mlp", ""), in_flight=3),
    "single sites": Case(groups=("embed", "blocks.*.*", "blocks.*.mlp.*", "head", "norm"), in_flight=3),
    "shared weights": Case(tied=True),
    "shared weights, root kept": Case(tied=True, groups=("blocks.*", "")),
    "frozen parameters": Case(frozen=("embed", "blocks.0", "blocks.1.mlp.up.weight", "head")),
    "adapters": Case(adapters=True, frozen=("embed", "norm", "head", "blocks")),
    "unused parameters": Case(unused=True),
    "several forwards": Case(forwards=3),
    "blocks called twice": Case(again=True),
    "weights without gradients": Case(detached=True),
    "recomputed units": Case(recompute="around"),
    "recomputed inside": Case(recompute="inside"),
    "recomputed inside, root kept": Case(recompute="inside", groups=("blocks.*", ""), forwards=2),
    "everything": Case(tied=True, unused=True, forwards=2, again=True, recompute="around", frozen=("blocks.1",)),
}


class Adapted(nn.Module):
    """A linear, and a low-rank product beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Mlp(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case
        linear = (lambda i, o: Adapted(nn.Linear(i, o))) if case.adapters else nn.Linear
        self.up, self.down = linear(WIDTH, INNER), linear(INNER, WIDTH)
        self.few = nn.Parameter(torch.randn(2, INNER))  # fewer rows than ranks
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        if self.case.detached:  # read in backward after the weights have their gradients
            x = x + nn.functional.linear(x @ self.up.weight.detach().T, self.down.weight.detach())
        return self.down(torch.tanh(self.up(x) * self.scale + self.few.sum(0)))


class Block(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(case)
        if case.unused:
            self.idle = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        h = self.norm(x)
        if self.case.recompute == "inside":
            return x + checkpoint(self.mlp, h, use_reentrant=False)
        return x + self.mlp(h)


class Net(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, case, blocks=2):
        super().__init__()
        self.case = case
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.unused:
            self.idle = nn.Linear(2, 3)
        for name, parameter in self.named_parameters():
            held = any(name == each or name.startswith(f"{each}.") for each in case.frozen)
            parameter.requires_grad_(not held or name.endswith((".a", ".b")))

    def forward(self, ids):
        h = self.embed(ids)
        for block in [*self.blocks, *self.blocks] if self.case.again else self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.case.recompute == "around" else block(h)
        return self.head(self.norm(h))


class Losses(nn.Module):
    """The sum of the losses of ``case.forwards`` batches, all computed before the backward."""

    def __init__(self, net, case):
        super().__init__()
        self.net, self.case = net, case

    def forward(self, batches):
        return sum((self.net(ids) * upstream).sum() for ids, upstream in batches)


def make(case, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    net = Net(case)
    return net if dtype == torch.float32 else net.to(dtype)


def batches_of(case, place, step, dtype):
    """What the data rank ``place`` computes with: ids and the gradients of its logits."""
    found = []
    for number in range(case.forwards):
        generator = torch.Generator().manual_seed(1000 * step + 10 * place + number)
        ids = torch.randint(0, VOCAB, (2, 3), generator=generator)
        found.append((ids, torch.randn(2, 3, VOCAB, dtype=torch.float64, generator=generator).to(dtype)))
    return found


def dense_gradients(case, ranks, step=0):
    """Gradients of the sum over ``ranks``, in float64, on one device."""
    model = make(case)
    for place in range(ranks):
        Losses(model, case)(batches_of(case, place, step, torch.float64)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(model, reference):
    """The largest difference of gradients from those of ``reference``; a missing one, or one too many, is infinite."""
    errors = {}
    for name, parameter in model.named_parameters():
        expected = reference[name]
        if (parameter.grad is None) != (expected is None):
            errors[name] = float("inf")
        elif expected is not None:
            local = parameter.grad.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes, f"{name}: its gradient pins more than its bytes"
            mine = cut(expected, parameter.device_mesh, parameter.placements)
            assert parameter.grad.placements == parameter.placements and local.shape == mine.shape
            if local.numel():
                errors[name] = dense.error(local, mine) / max(1.0, expected.abs().max().item())
    return errors


def mesh_and_levels(axes, mesh_of=dense.mesh_of):
    mesh = mesh_of(**axes)
    if "replica" not in axes:
        return mesh, LEVELS
    hybrid = {
        name: words | {"level": {"replica": "replicate", "shard": words["level"]}} for name, words in LEVELS.items()
    }
    return mesh, hybrid


@contextmanager
def counting_groups():
    """A list of one number: the most parameter groups gathered at once, but those that stay so by level or ``keep``."""
    most, start = [0], Schedule._start

    def counted(self, param_group, mode):
        start(self, param_group, mode)
        others = [each for each in self.param_groups if not (each.sharding.resident or each.sharding.keep)]
        most[0] = max(most[0], sum(each.gathered for each in others))

    Schedule._start = counted
    try:
        yield most
    finally:
        Schedule._start = start


def gradients_match(axes, names, levels, poison=False, mesh_of=dense.mesh_of):
    """{(case, level): {parameter: error}} of those above 1e-12; two backwards each, for the second one prefetches."""
    mesh, words = mesh_and_levels(axes, mesh_of)
    world, rank = dist.get_world_size(), dist.get_rank()
    arena = sw.Runtime.of(mesh).arena
    arena.poison = poison
    wrong = {}
    for name in names:
        case = CASES[name]
        references = [dense_gradients(case, world, step) for step in range(2)]
        for level in levels:
            model = sw.shard(make(case), mesh, groups=case.groups, in_flight=case.in_flight, **words[level])
            for step, reference in enumerate(references):
                with counting_groups() as most:
                    Losses(model, case)(batches_of(case, rank, step, torch.float64)).backward()
                errors = {key: value for key, value in worst(model, reference).items() if not value <= 1e-12}
                if errors or arena.held or most[0] > case.in_flight:
                    wrong[name, level, step] = errors | {"held": arena.held, "groups": most[0]}
                model.zero_grad()
    arena.poison = False
    return wrong


ALL = tuple(LEVELS)
FEW = ("root kept", "shared weights", "frozen parameters", "adapters", "everything")


def fail(*_):
    raise ZeroDivisionError


class Chain(nn.Sequential):
    """``count`` units in a row: linears of ``width``, or gated pairs of linears with ``hidden`` in between."""

    def __init__(self, count, width=64, bias=False, dtype=torch.float32, hidden=None):
        torch.manual_seed(0)
        super().__init__(
            *(
                Gated(width, hidden, dtype) if hidden else nn.Linear(width, width, bias=bias, dtype=dtype)
                for _ in range(count)
            )
        )


class Gated(nn.Module):
    def __init__(self, width, hidden, dtype):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def recorded(axes, level, chain, options=None, steps=2, rows=2, dtype=torch.float32):
    """The trace of ``steps`` steps of a chain, and what its gradients hold: (bytes of storage, bytes of gradients)."""
    mesh, levels = mesh_and_levels(axes)
    model = sw.shard(Chain(**chain), mesh, **(levels[level] | (options or {})))
    return record_steps(model, torch.ones(rows, chain.get("width", 64), dtype=dtype), steps)


def record_steps(model, x, steps):
    optimizer = FusedAdamW(model.parameters())
    behind = of = 0
    with sw.record(model, optimizer) as trace:
        for _ in range(steps):
            y = model(x)
            with span("loss"):
                loss = y.sum()
            del y
            loss.backward()
            del loss
            grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
            behind = sum({id(g.untyped_storage()): g.untyped_storage().nbytes() for g in grads}.values())
            of = sum(g.nbytes for g in grads)
            del grads
            optimizer.step()
            optimizer.zero_grad()
    return trace, behind, of


def most(trace, categories, step):
    """The most bytes of ``categories`` alive at once in a step."""
    alive = best = 0
    for event in trace.events:
        if isinstance(event, (Alloc, Free)) and trace.storages[event.storage].category in categories:
            size = trace.storages[event.storage].bytes
            alive += size if isinstance(event, Alloc) else -size
        if event.step == step:
            best = max(best, alive)
    return best


UNIT = 4 * 64 * 64


def counts(trace, step):
    found = {}
    for event in trace.collectives:
        if event.step == step:
            found[event.kind] = found.get(event.kind, 0) + 1
    return found
