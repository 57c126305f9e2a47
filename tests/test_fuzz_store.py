"""300 ill-behaved training programs over ``sw.shard``: what plain modules give, or one clear error (fuzz_store.py)."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwright.params.stored import StoredParameter
from support import faithful, fuzz_store
from support.fuzz_store import Pool, fuzz
from support.ill_behaved import LEVELS, Program, draw
from support.ill_behaved_net import SIDES, Net, Shape
from support.ill_behaved_run import Run
from support.ranks import on_ranks

DRAWS = 300


def test_programs_train_alike_or_end_in_one_clear_error():
    report = fuzz(range(DRAWS))
    print(report)
    assert not report.failures, "\n".join(report.failures)
    assert report.kinds["trained"] >= 0.7 * DRAWS, str(report)


# -- that the draw covers what it should, and that failures are seen -------------------------------------------------


def test_the_draws_cover_what_they_should():
    programs = [draw(seed) for seed in range(DRAWS)]
    assert {program.world for program in programs} == {2, 3, 4}
    assert {program.level for program in programs} == set(LEVELS)
    assert {program.shape.side for program in programs} == set(SIDES)
    assert len({(program.root, bool(program.bucket), program.unused, program.replicas) for program in programs}) >= 12
    steps = [step for program in programs for step in program.steps]
    for feature, least in {"evaluate": 40, "swap": 40, "freeze": 25, "raise": 25, "replace": 2}.items():
        assert sum(any(step["do"] == feature for step in program.steps) for program in programs) >= least, feature
    assert sum("absent" in step for step in steps) >= 10
    apart = [step for step in steps if any(choice != step["choices"][0] for choice in step.get("choices", ()))]
    assert len(apart) >= 50


def test_a_program_can_be_printed_and_run_again():
    for seed in range(20):
        assert Program.from_json(draw(seed).to_json()) == draw(seed)


PLAIN = [{"do": "forward", "choices": [{}, {}], "data": 1}, {"do": "backward", "sync": True, "how": "sum"}]


@pytest.fixture
def pool():
    found = Pool()
    yield found
    found.drop()


def test_a_wrong_gradient_is_seen_and_shrunk(pool, monkeypatch):
    land = StoredParameter.land
    monkeypatch.setattr(StoredParameter, "land", lambda self, gradient: land(self, gradient * 1.000001))
    steps = ({"do": "evaluate", "mode": "no_grad", **PLAIN[0]} | {"do": "evaluate"}, *PLAIN, {"do": "step"})
    program = Program(0, steps=steps, bucket=256)
    outcome = pool.run(program)
    assert outcome.kind == "different" and "gradient of stem.weight is off by" in outcome.told
    least, _ = fuzz_store._shrunk(program, outcome, pool)
    assert least == Program(0, steps=tuple(PLAIN))


def test_a_rank_that_hangs_and_one_that_dies_are_seen(pool, monkeypatch):
    program = Program(0, steps=tuple(PLAIN))
    monkeypatch.setattr(fuzz_store, "PATIENCE", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(faithful, "run", lambda program: time.sleep(60) if dist.get_rank() else "trained")
        assert pool.run(program).kind == "hang"
    with monkeypatch.context() as patch:
        patch.setattr(faithful, "run", lambda program: os._exit(3) if dist.get_rank() else "trained")
        assert pool.run(program).kind == "died"


# -- that the reference is what DistributedDataParallel gives --------------------------------------------------------


def through_ddp(program):
    """The largest difference of the reference's gradients from those of DDP times the ranks."""
    reference = faithful.Reference(program)
    reference.run()
    world, run = dist.get_world_size(), Run.__new__(Run)
    run.program, run.rank = program, dist.get_rank()
    run.net = Net(program.shape, program.seed).double()
    run.model = DistributedDataParallel(run.net, find_unused_parameters=True)
    (run._forward(program.steps[0])[1]).backward()
    expected = {of: value for what, of, value in reference.seen if what == "gradient"}
    for name, parameter in run.net.named_parameters():
        if (parameter.grad is None) != (expected[name] is None):
            return float("inf"), name
    pairs = [(p.grad * world, expected[name]) for name, p in run.net.named_parameters() if p.grad is not None]
    return max(float((a - b).abs().max()) for a, b in pairs), len(pairs)


def test_the_reference_is_ddp_with_unused_parameters():
    """Two ranks, each with its own expert, one without the adapter; a third expert that nobody uses."""
    shape = Shape(experts=3, adapter=True, tied="stem and head")
    choices = [{"experts": [0], "adapter": False}, {"experts": [1], "skip": [1]}]
    program = Program(5, shape=shape, steps=({**PLAIN[0], "choices": choices}, PLAIN[1]))
    every = len(list(Net(shape, 0).parameters()))
    for error, count in on_ranks(2, through_ddp, program):
        assert error <= 1e-14
        assert count == every - 2
