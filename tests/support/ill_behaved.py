"""Training programs that are not as a library would like them: what is done with a net, step by step, and draws.

A program is data: it can be printed as JSON and run again, and loses any of its steps without becoming invalid.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import Any

from support.ill_behaved_net import SIDES, Shape

LEVELS = ("replicate", "optimizer", "gradients", "parameters", "kept")
Step = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """What is run, and how it is stored.

    replicas: more than 1 stores hybrid, on a mesh of two axes. hooks: {"kind", "on", "before"}: before ``shard``, or
    after it. steps: dictionaries with a ``do`` each (see draw).
    """

    seed: int
    world: int = 2
    replicas: int = 1
    level: str = "parameters"
    bucket: int = 0
    root: bool = False
    in_flight: int = 2
    unused: str = "error"
    optimizer: str = "sgd"
    inputs_train: bool = False
    shape: Shape = field(default_factory=Shape)
    hooks: tuple[dict[str, Any], ...] = ()
    steps: tuple[Step, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        read = json.loads(text)
        return cls(
            **{**read, "shape": Shape(**read["shape"]), "hooks": tuple(read["hooks"]), "steps": tuple(read["steps"])}
        )

    def __str__(self) -> str:
        plain = {each.name: each.default for each in dataclasses.fields(self)}
        told = [
            f"{k}={v!r}" for k, v in vars(self).items() if k != "steps" and (v != plain[k] or k in ("world", "level"))
        ]
        return "\n    ".join([" ".join(told), *map(json.dumps, self.steps)])


FEATURES = (
    "experts", "depth", "adapter", "swap", "average", "drop", "skip micro-batch", "accumulate", "freeze", "exception",
    "evaluation", "forwards", "side", "hooks", "recompute", "tied",
)  # fmt: skip
RARE = ("modify between", "replace", "outside")
SWAPS = ("copy_", "data.copy_", "data.mul_", "foreach", "load_state_dict", "state_dict api")
ZEROS = ("optimizer", "module", "loop", "zeros")


def draw(seed: int) -> Program:
    """The program of that seed."""
    rng = random.Random(seed)
    features = set(rng.sample(FEATURES, rng.randint(1, 4)))
    if rng.random() < 0.08:
        features.add(rng.choice(RARE))
    world = rng.choices((2, 3, 4), (8, 2, 1))[0]
    shape = Shape(
        blocks=rng.choice((2, 2, 2, 3)),
        experts=rng.randint(2, 3) if "experts" in features else 0,
        adapter="adapter" in features,
        tied=rng.choice(("stem and head", "blocks")) if "tied" in features else "",
        side=rng.choice(SIDES[1:]) if "side" in features else "",
        recompute=rng.choice(("around", "inside", "method")) if "recompute" in features else "",
        outside="outside" in features,
    )
    skips = bool(features & {"experts", "depth", "adapter"})
    program = Program(
        seed=seed,
        world=world,
        replicas=2 if world == 4 and rng.random() < 0.4 else 1,
        level=rng.choice(LEVELS),
        bucket=rng.choice((0, 0, 256, 4096)),
        root=rng.random() < 0.4,
        in_flight=rng.choice((1, 2, 2, 3)),
        unused=rng.choice(("error", "zeros")) if skips or rng.random() < 0.2 else "error",
        optimizer=rng.choice(("sgd", "sgd foreach", "adamw", "adamw fused", "adamw fused")),
        inputs_train=rng.random() < 0.3,
        shape=shape,
        hooks=_hooks(rng) if "hooks" in features else (),
    )
    return dataclasses.replace(program, steps=tuple(_Steps(rng, program, features).draw()))


def _hooks(rng: random.Random) -> tuple[dict[str, Any], ...]:
    """One to three that differ."""
    found = {}
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(("forward", "forward pre", "backward", "parameter", "accumulated"))
        on = rng.choice(("stem", "head", "blocks.0.mlp.up"))
        on += ".weight" if kind in ("parameter", "accumulated") else ""
        found[kind, on] = {"kind": kind, "on": on, "before": rng.random() < 0.5}
    return tuple(found.values())


class _Steps:
    def __init__(self, rng: random.Random, program: Program, features: set[str]):
        self.rng, self.program, self.features = rng, program, features
        self.apart = rng.random() < 0.45  # ranks choose each for itself

    def draw(self) -> list[Step]:
        steps: list[Step] = []
        for number in range(self.rng.choice((1, 2, 2, 2))):
            steps += self._before(number) + self._micro_batches() + [{"do": "step"}, self._zero()]
        return steps

    def _chance(self, feature: str, share: float = 0.6) -> bool:
        return feature in self.features and self.rng.random() < share

    def _zero(self) -> Step:
        return {"do": "zero", "how": self.rng.choice(ZEROS)}

    def _choice(self) -> dict[str, Any]:
        shape, choice = self.program.shape, {}
        if shape.experts:
            choice["experts"] = sorted(self.rng.sample(range(shape.experts), self.rng.randint(0, shape.experts - 1)))
        if self._chance("depth"):
            choice["skip"] = [self.rng.randrange(shape.blocks)]
        if shape.adapter:
            choice["adapter"] = self.rng.random() < 0.5
        return choice

    def _forward(self, **more: Any) -> Step:
        world = self.program.world
        choices = [self._choice() for _ in range(world)] if self.apart else [self._choice()] * world
        return {"do": "forward", "choices": choices, "data": self.rng.randrange(2**20), **more}

    def _swap(self) -> Step:
        return {"do": "swap", "how": self.rng.choice(SWAPS), "by": self.rng.choice((0.5, 0.9, 1.1))}

    def _evaluation(self) -> Step:
        return self._forward(do="evaluate", mode=self.rng.choice(("no_grad", "inference_mode")))

    def _before(self, number: int) -> list[Step]:
        """What comes before the micro-batches of a step."""
        steps: list[Step] = []
        if self._chance("freeze"):
            part = self.rng.choice(("stem", "blocks.0", "blocks.1.mlp", "blocks.1.scale"))
            steps.append({"do": "freeze", "what": part, "train": number > 0 and self.rng.random() < 0.5})
        if self._chance("evaluation"):
            steps.append(self._evaluation())
        if self._chance("swap"):
            steps.append(self._swap())
        if self._chance("average"):  # weights swapped for an evaluation, and back
            there, back = self._swap(), self._swap()
            back["by"] = 1 / there["by"]
            steps += [there, self._evaluation(), back]
        if self._chance("replace", 0.5):
            steps.append({"do": "replace", "what": self.rng.choice(("attribute", "assign")), "by": 0.5})
        if self._chance("drop"):
            steps += [*self._accumulated(), {"do": "zero", "how": self.rng.choice((*ZEROS, "discard"))}]
        if self._chance("exception"):
            fail = self.rng.choice(("forward", "backward"))
            steps += [*(self._accumulated() if self.rng.random() < 0.3 else ()), self._forward(do="raise", fail=fail)]
            steps.append(self._zero())
        return steps

    def _accumulated(self, **more: Any) -> list[Step]:
        return [self._forward(**more), {"do": "backward", "sync": False, "how": "sum"}]

    def _micro_batches(self) -> list[Step]:
        steps: list[Step] = []
        if self._chance("accumulate", 0.8):
            steps += self._accumulated()
        if self._chance("skip micro-batch", 0.3):
            steps += self._accumulated(absent=self.rng.randrange(self.program.world))
        forwards = self.rng.randint(2, 3) if self._chance("forwards") else 1
        for _ in range(forwards):
            steps.append(self._forward())
            if self._chance("evaluation", 0.2):
                steps.append(self._evaluation())
        if self._chance("modify between", 0.5):  # in a way that plain torch notices
            steps.append({**self._swap(), "how": self.rng.choice(("copy_", "load_state_dict"))})
        steps.append({"do": "backward", "sync": True, "how": self.rng.choice(("sum", "each", "reverse"))})
        if self._chance("accumulate", 0.2):  # a second one that is reduced, before the step
            steps += [self._forward(), {"do": "backward", "sync": True, "how": "sum"}]
        return steps
