"""Anyone's module, stored by level: against dense float64 and against DDP, and what travels and lives (C2, C7–C18)."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dense
import shardwright as sw
from ranks import on_ranks
from reference import assert_same
from shardwright._rehearse import stage
from shardwright.mesh import chunk
from shardwright.params import InFlightError, cut, unit
from shardwright.step import FusedAdamW
from shardwright.trace import Alloc, Free, Op, span
from shardwright.trace.events import POINTS

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

    units: tuple[str, ...] | None = None
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
    "root kept": Case(units=("blocks.*", "")),
    "one unit": Case(units=("",)),
    "nested units": Case(units=("blocks.*", "blocks.*.mlp", ""), in_flight=3),
    "single sites": Case(units=("embed", "blocks.*.*", "blocks.*.mlp.*", "head", "norm"), in_flight=3),
    "shared weights": Case(tied=True),
    "shared weights, root kept": Case(tied=True, units=("blocks.*", "")),
    "frozen parameters": Case(frozen=("embed", "blocks.0", "blocks.1.mlp.up.weight", "head")),
    "adapters": Case(adapters=True, frozen=("embed", "norm", "head", "blocks")),
    "unused parameters": Case(unused=True),
    "several forwards": Case(forwards=3),
    "blocks called twice": Case(again=True),
    "weights without gradients": Case(detached=True),
    "recomputed units": Case(recompute="around"),
    "recomputed inside": Case(recompute="inside"),
    "recomputed inside, root kept": Case(recompute="inside", units=("blocks.*", ""), forwards=2),
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


def mesh_and_levels(axes):
    mesh = dense.mesh_of(**axes)
    if "replica" not in axes:
        return mesh, LEVELS
    hybrid = {
        name: words | {"level": {"replica": "replicate", "shard": words["level"]}} for name, words in LEVELS.items()
    }
    return mesh, hybrid


@contextmanager
def counting_units():
    """A list of one number: the most units gathered at once, those aside that stay so by their level or ``keep``."""
    most, start = [0], unit.Unit.start

    def counted(self, mode):
        start(self, mode)
        others = [each for each in self.schedule.units if not (each.sharding.resident or each.sharding.keep)]
        most[0] = max(most[0], sum(each.gathered for each in others))

    unit.Unit.start = counted
    try:
        yield most
    finally:
        unit.Unit.start = start


def gradients_match(axes, names, levels, poison=False):
    """{(case, level): {parameter: error}} of those above 1e-12; two backwards each, for the second one prefetches."""
    mesh, words = mesh_and_levels(axes)
    world, rank = dist.get_world_size(), dist.get_rank()
    arena = sw.Runtime.of(mesh).arena
    arena.poison = poison
    wrong = {}
    for name in names:
        case = CASES[name]
        references = [dense_gradients(case, world, step) for step in range(2)]
        for level in levels:
            model = sw.shard(make(case), mesh, units=case.units, in_flight=case.in_flight, **words[level])
            for step, reference in enumerate(references):
                with counting_units() as most:
                    Losses(model, case)(batches_of(case, rank, step, torch.float64)).backward()
                errors = {key: value for key, value in worst(model, reference).items() if not value <= 1e-12}
                if errors or arena.held or most[0] > case.in_flight:
                    wrong[name, level, step] = errors | {"held": arena.held, "units": most[0]}
                model.zero_grad()
    arena.poison = False
    return wrong


ALL = tuple(LEVELS)
FEW = ("root kept", "shared weights", "frozen parameters", "adapters", "everything")


@pytest.mark.parametrize(
    ("axes", "names", "levels", "poison"),
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
            options = words[level] | {"units": case.units, "in_flight": case.in_flight}
            model = sw.shard(make(case, torch.float32), mesh, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            found = after_three_steps(model, Losses(model, case), optimizer, case)
            error = max(dense.error(found[key], expected[key]) for key in expected)
            if list(found) != list(expected) or not error <= 1e-6:
                wrong[name, level] = error
    return wrong


@pytest.mark.parametrize(
    ("axes", "names", "levels"),
    [
        ({"data": 2}, tuple(CASES), ("parameters",)),
        ({"data": 2}, FEW, ("replicate", "optimizer", "gradients", "kept")),
        ({"data": 3}, FEW[1:2], ALL),
        ({"replica": 2, "shard": 2}, FEW[3:], ("optimizer", "parameters")),
    ],
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


def fail(*_):
    raise ZeroDivisionError


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


# -- what travels and what lives -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("world", [2, 4])
def test_a_large_gradient_is_reduced_from_its_own_storage(world):
    """Beside it: its part, and two parts for arrivals. Nothing else of more than the activations' size is made."""
    chain = {"count": 3}
    for trace, behind, of in on_ranks(world, recorded, {"data": world}, "gradients", chain):
        assert behind == of == 3 * UNIT // world
        born = [trace.storages[e.storage] for e in trace.events if isinstance(e, Alloc) and e.phase == "backward"]
        large = [s for s in born if s.bytes > UNIT // world]
        assert [(s.category, s.op) for s in large] == [("unreduced", "aten.mm.default")] * 6
        scratch = [s for s in born if s.bytes == UNIT // world and s.category != "gradient"]
        assert len(scratch) == 6 * min(2, world - 2)
        assert {s.bytes for s in born} <= {UNIT, UNIT // world, 4, 2 * 64 * 4}


def counts(trace, step):
    found = {}
    for event in trace.collectives:
        if event.step == step:
            found[event.kind] = found.get(event.kind, 0) + 1
    return found


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_collectives_of_a_chain(in_flight):
    """U units, each of two tensors: gathered again U + (U−1), kept U; in the later steps, which prefetch, too."""
    chain = {"count": 5, "width": 8, "bias": True}
    expected = {
        "replicate": {"all_reduce": 5},
        "optimizer": {"all_gather": 5, "reduce_scatter": 5},
        "gradients": {"all_gather": 5, "reduce_scatter": 5},
        "parameters": {"all_gather": 9, "reduce_scatter": 5},
        "kept": {"all_gather": 5, "reduce_scatter": 5},
    }
    for level, count in expected.items():
        for trace, _, _ in on_ranks(2, recorded, {"data": 2}, level, chain, {"in_flight": in_flight}, 3):
            assert [counts(trace, step) for step in (1, 2, 3)] == [count] * 3, level
            ahead = [c for c in trace.collectives if c.kind == "all_gather" and c.step == 3 and c.mode == "async"]
            if level == "parameters":
                assert len(ahead) == (0 if in_flight == 1 else 4 + 4)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_no_more_units_live_than_stated(in_flight):
    """As many as stated, once their order is known; and neither that nor unreduced gradients grow with the depth."""
    transient = []
    for count in (5, 10):
        for trace, _, _ in on_ranks(2, recorded, {"data": 2}, "parameters", {"count": count}, {"in_flight": in_flight}):
            assert most(trace, ("gathered",), 1) == UNIT
            assert most(trace, ("gathered",), 2) == in_flight * UNIT
            transient.append([most(trace, ("gathered", "unreduced", "bucket"), step) for step in (1, 2)])
    assert transient == [transient[0]] * 4
    assert max(transient[0]) <= (in_flight + 2) * UNIT


BLOCK = {"count": 4, "hidden": 256, "dtype": torch.bfloat16}


def test_communication_peak_of_blocks():
    """Four blocks of 98,304 B: of gathered weights and unreduced gradients at most three blocks' worth."""
    for trace, _, _ in on_ranks(2, recorded, {"data": 2}, "parameters", BLOCK, None, 3, 2, torch.bfloat16):
        assert max(most(trace, ("gathered", "unreduced", "bucket"), step) for step in (1, 2, 3)) <= 3 * 98_304


def test_the_transient_of_hybrid_sharding_does_not_grow_with_the_depth():
    """bf16 products of fp32 parameters over 2 × 2 ranks: the fp32 parts of sums are the gradients, nothing beside."""
    found = []
    for count in (3, 6):
        args = ({"replica": 2, "shard": 2}, "parameters", {"count": count}, {"dtype": torch.bfloat16})
        for trace, behind, of in on_ranks(4, recorded, *args, 2, 2, torch.bfloat16):
            assert behind == of == count * UNIT // 2
            transient = ("gathered", "unreduced", "bucket", "temporary")
            found.append([most(trace, transient, step) for step in (1, 2)])
    assert found == [found[0]] * 8


def accumulated(level, unsynchronised):
    """(bytes of gradients after each of two micro-batches, the largest error against one big batch)."""
    mesh = dense.mesh_of(data=2)
    model = sw.shard(Chain(2, 8, dtype=torch.float64), mesh, level)
    xs = [dense.random(2, 8, seed=10 * place + micro) for place in range(2) for micro in range(2)]
    mine = xs[2 * dist.get_rank() :][:2]
    held = []
    with sw.record(model) as trace:
        with sw.no_sync(model) if unsynchronised else model.parameter_store.schedule.accumulate():
            model(mine[0]).square().sum().backward()
        torch.zeros(1)  # the recorder notices the end of backward
        model(mine[1]).square().sum().backward()
    held = [p.categories["gradient"] for p in trace.points if p.name == "after backward"]
    whole = Chain(2, 8, dtype=torch.float64)
    whole(torch.cat(xs)).square().sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return held, max(dense.error(a.grad.full_tensor(), b.grad) for a, b in pairs)


@pytest.mark.parametrize(
    ("level", "unsynchronised", "held"),
    [
        ("replicate", False, [2, 2]),
        ("optimizer", False, [2, 1]),
        ("gradients", False, [1, 1]),
        ("parameters", False, [1, 1]),
        ("parameters", True, [2, 1]),
    ],
)
def test_accumulation_with_and_without_synchronisation(level, unsynchronised, held):
    """C14. Two linears of 8 × 8 over 2 ranks: what is reduced once a step, or not yet, is held whole in between."""
    for found, error in on_ranks(2, accumulated, level, unsynchronised):
        assert found == [each * 8 * 8 * 8 for each in held]
        assert error <= 1e-12


def small_and_large(level, unsynchronised):
    """.grad after micro-batches whose bf16 gradients are 1 and 2⁻⁹ (on one rank; 0 on the others)."""
    model = nn.Linear(1, 1, bias=False)
    sw.shard(model, dense.mesh_of(data=dist.get_world_size()), level, dtype=torch.bfloat16)
    for number, value in enumerate((1.0, 2.0**-9)):
        hold = unsynchronised and number == 0
        with sw.no_sync(model) if hold else nullcontext():
            x = torch.full((1, 1), value * (dist.get_rank() == 0), dtype=torch.bfloat16)
            model(x).sum().backward()
    return model.weight.grad.full_tensor().item()


@pytest.mark.parametrize("level", ["replicate", "optimizer", "gradients", "parameters"])
def test_micro_batches_add_up_in_float32(level):
    """C14: 1 + 2⁻⁹ would be 1 in bfloat16."""
    for unsynchronised in (False, True):
        assert on_ranks(2, small_and_large, level, unsynchronised) == [1.001953125] * 2


class Mixed(nn.Module):
    """A frozen linear in bf16 with fp32 adapters."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(4, 64)), nn.Parameter(torch.ones(64, 4))

    def forward(self, x):
        return self.base(x.bfloat16()).float() + x @ self.a.T @ self.b.T


def mixed_bytes(level):
    model = sw.shard(nn.Sequential(Mixed(), Mixed()), dense.mesh_of(data=dist.get_world_size()), level)
    model(torch.ones(2, 64)).sum().backward()
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    return sum(g.untyped_storage().nbytes() for g in grads), {g.dtype for g in grads}


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_and_trainable_parameters_of_two_element_types(world):
    for held, dtypes in on_ranks(world, mixed_bytes, "parameters"):
        assert held == 2 * 2_048 // world
        assert dtypes == {torch.float32}


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


# -- errors, leaks, what costs nothing -------------------------------------------------------------------------------


def asked_too_much(units):
    model = sw.shard(make(Case()), dense.mesh_of(data=2), units=units, in_flight=1)
    with pytest.raises(InFlightError) as caught:
        model(torch.zeros(1, 1, dtype=torch.int64))
    return str(caught.value)


def test_more_units_than_stated_is_an_error_that_names_the_unit():
    for message in on_ranks(2, asked_too_much, ("blocks.*", "blocks.*.mlp")):
        assert message.startswith("blocks.0.mlp is asked for while blocks.0 are gathered; in_flight states 1. ")
        assert "\n" not in message


def leaks(axes):
    """What of a model lives on after ``del``; the process groups after each of five builds."""
    mesh, levels = mesh_and_levels(axes)
    alive, groups = [], []
    for _ in range(5):
        case = CASES["everything"]
        model = sw.shard(make(case), mesh, bucket="1MiB", **levels["parameters"])
        loss = Losses(model, case)(batches_of(case, dist.get_rank(), 0, torch.float64))
        loss.backward()
        del loss
        store = model.parameter_store
        references = [weakref.ref(each) for each in (model, store, store.schedule, *store.schedule.units)]
        references += [weakref.ref(each) for each in model.parameters()]
        del model, store
        gc.collect()
        alive += [reference() for reference in references if reference() is not None]
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return [type(each).__name__ for each in alive], groups


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 8}, {"replica": 2, "shard": 2}])
def test_nothing_outlives_the_model(axes):
    for alive, groups in on_ranks(torch.Size(axes.values()).numel(), leaks, axes):
        assert alive == []
        assert groups == groups[:1] * 5


def cost_of_one(level):
    model = sw.shard(Chain(3, bias=True), dense.mesh_of(data=1), **LEVELS[level])
    plain = Chain(3, bias=True)
    return [record_steps(each, torch.ones(2, 64), 2)[0] for each in (model, plain)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_shard_group_of_one_costs_nothing(level):
    """No collective, no copy, not a byte more than the plain module's at any peak."""
    ((ours, plain),) = on_ranks(1, cost_of_one, level)
    assert ours.collectives == ()
    assert ours.phase_peaks == plain.phase_peaks
    copies = {"aten.copy_.default", "aten.clone.default", "aten._to_copy.default"}
    assert not copies & {event.name for event in ours.events if isinstance(event, Op)}


class OnGrid(nn.Module):
    """A norm that sees tokens split over both axes, and two linears whose features are split over one of them."""

    def __init__(self, mesh, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up, self.down = (nn.Linear(*shape, dtype=torch.float64) for shape in ((8, 12), (12, 8)))
        nn.init.normal_(self.norm.weight)
        if mesh is not None:
            column = sw.GridLayout(m=("data",), n=("tensor",), x="sharded", save_x="shard")
            row = sw.GridLayout(m=("data",), k=("tensor",), y="sharded")
            self.up = sw.GridLinear.from_dense(self.up, column, mesh, f"{seed}.up")
            self.down = sw.GridLinear.from_dense(self.down, row, mesh, f"{seed}.down")

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def on_two_meshes(data):
    """(errors, the most reductions alive in one group, the sizes of the groups)."""
    mesh = dense.mesh_of(data=data, tensor=2)
    model = nn.Sequential(*(OnGrid(mesh, seed) for seed in range(4)))
    plain = nn.Sequential(*(OnGrid(None, seed) for seed in range(4)))
    placements = model[0].up.input_placements
    model = sw.shard(model, mesh, "parameters")
    travelling, alive, kind = {}, {}, unit.ScatteringTogether

    class Watched(kind):
        def __init__(self, pairs, group, *rest):
            living = [each for each in travelling.get(group.ranks, []) if any(ref() is not None for ref in each)]
            living.append([weakref.ref(whole.untyped_storage()) for whole, _ in pairs])
            travelling[group.ranks] = living
            alive[group.ranks] = max(alive.get(group.ranks, 0), len(living))
            super().__init__(pairs, group, *rest)

    x, up = dense.random(16, 8, seed=1), dense.random(16, 8, seed=2)
    unit.ScatteringTogether = Watched
    try:
        y = model(dense.part(x, mesh, placements))
        y.backward(dense.part(up, mesh, placements))
    finally:
        unit.ScatteringTogether = kind
    plain(x).backward(up)
    errors = {
        name: dense.error(ours.grad.full_tensor(), theirs.grad)
        for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True)
    }
    return errors, max(alive.values()), sorted(len(ranks) for ranks in alive)


def test_two_meshes_in_a_unit_hold_one_reduction_a_group():
    for data in (2, 4):
        for errors, alive, groups in on_ranks(2 * data, on_two_meshes, data):
            assert max(errors.values()) <= 1e-12, errors
            assert alive == 1
            assert groups == [data, 2 * data]


# -- memory, and its rehearsal ---------------------------------------------------------------------------------------


def expected_memory(level, ranks, iteration, point, units=3, unit=4 * 8 * 8, row=4 * 2 * 8):
    """Bytes by category at a ledger point of a chain of linears, each a unit, on two rows."""
    whole = units * unit
    stored = whole if level == "replicate" else whole // ranks
    begun = iteration > 1 or point != "start"
    stepped = iteration > 1 or point in ("after step", "done")
    between = point in ("after forward", "after loss")
    resident = whole if level in ("optimizer", "gradients") and begun else 0
    # The last unit, or all, stays for backward; what the graph holds of it (all but the first: dX is not wanted there)
    # is in the ledger as saved.
    saved, gathered = {"parameters": (unit, 0), "kept": (whole - unit, unit)}.get(level, (0, 0))
    return {
        "parameter": stored + resident,
        "buffer": 0,
        "input": row if begun else 0,
        "gradient": stored if point in ("after backward", "after step") else 0,
        "optimizer": 2 * stored + 4 * units if stepped else 0,  # two moments, and one count of steps a parameter
        "saved": (units - 1) * row + saved if between else 0,  # the inputs of all linears but the first
        "gathered": gathered if between else 0,
        "unreduced": 0,
        "bucket": 0,
        "temporary": {"after forward": row, "after loss": 4 + 4}.get(point, 0),  # the output; the loss, its gradient
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_memory_by_formula(level, world):
    """Four iterations × six points, to the byte."""
    chain = {"count": 3, "width": 8}
    for trace, _, _ in on_ranks(world, recorded, {"data": world}, level, chain, None, 4):
        assert len(trace.points) == 4 * 6
        for place, point in enumerate(trace.points):
            assert (point.step, point.name) == (place // 6 + 1, POINTS[place % 6])
            expected = expected_memory(level, world, point.step, point.name)
            assert point.categories == expected, (point.step, point.name)
            assert point.total == sum(expected.values())
        assert trace.saved_bytes == 4 * 2 * 8 + max(point.categories["saved"] for point in trace.points)


def record_net(mesh, case, level):
    model = sw.shard(make(case, torch.float32), mesh, units=case.units, in_flight=case.in_flight, **LEVELS[level])
    return record_steps(model, torch.zeros(2, 3, dtype=torch.int64), 2)[0]


def record_nets(axes, cases, level):
    return [record_net(dense.mesh_of(**axes), case, level) for case in cases]


@pytest.mark.parametrize("level", LEVELS)
def test_a_rehearsal_is_the_run(level):
    cases = [Case(tied=True, frozen=("blocks.0",), recompute="around"), CASES["recomputed inside, root kept"]]
    axes = {"data": 2}
    for rank, traces in enumerate(on_ranks(2, record_nets, axes, cases, level)):
        with stage(SimpleNamespace(mesh=axes, world_size=2, backend="gloo"), rank) as mesh, FakeTensorMode():
            for case, real in zip(cases, traces, strict=True):
                assert_same(record_net(mesh, case, level), real)


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
        units=units,
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
