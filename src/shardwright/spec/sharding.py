"""Sharding: how the parameters of one parameter group are stored over mesh axes, as data.

A parameter group is what is gathered, released and reduced together: a block of the model, as a rule. A level is a
choice of two points of its schedule: when the gathered W is released, and when dW is reduced.

| level      | known as | W is released                       | dW is reduced when the group's backward is over   |
|------------|----------|-------------------------------------|--------------------------------------------------|
| replicate  | DDP      | never: every rank stores it whole   | once a step, all-reduced                         |
| optimizer  | ZeRO-1   | never: gathered once a step         | once a step, reduce-scattered                    |
| gradients  | ZeRO-2   | never: gathered once a step         | in each micro-batch, reduce-scattered            |
| parameters | ZeRO-3   | after the group's forward (not where | in each micro-batch, reduce-scattered            |
|            |          | ``keep``), and after its backward   |                                                  |

Optimizer states follow the stored shard, so they are split at every level but ``replicate``.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import InputError
from shardwright.spec.dtypes import STORED

LEVELS = ("replicate", "optimizer", "gradients", "parameters")
HYBRID = "hsdp"
"""Level ``parameters`` over the last data axis, ``replicate`` over the others."""
ALIASES = {"ddp": "replicate", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters", "fsdp": "parameters"}
"""Other names of levels; written in any case, with or without a hyphen (``ZeRO-3``)."""
SPELLED = (*LEVELS, "ddp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "fsdp", HYBRID)
"""The words of levels as they are usually written."""
ONCE_A_STEP = ("replicate", "optimizer")
"""Levels at which gradients of several micro-batches add up whole, to be reduced once a step."""
FAIR_SHARE = 4
"""Gradients travel before their parameter group is complete once they are a fourth of its bytes, and as much is still
to come.
"""


@dataclass(frozen=True)
class Sharding:
    """How one parameter group's parameters are stored.

    level: one of LEVELS. axes: the mesh axes over which storage is split (one group over all of them); on other axes
    over which gradients are partial it is whole, and shards of gradients are all-reduced (hybrid sharding).
    keep: level ``parameters`` only; W stays gathered from a forward to its backward.
    dtype: element type in which products read W; None is that of the stored parameter. Gradients travel in it.
    reduce_dtype: element type in which gradients are added up; None is that of the stored parameter.
    bucket: bytes of the buffer in which small gradients travel together (runtime/bucket.py); 0: none does.

    Raises InputError for a word that is not allowed, and where the level splits storage and no axis is named.
    """

    level: str = "replicate"
    axes: tuple[str, ...] = ()
    keep: bool = False
    dtype: str | None = None
    reduce_dtype: str | None = None
    bucket: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        if self.level not in LEVELS:
            raise InputError(f"level: found {self.level!r}; allowed: {', '.join(LEVELS)}")
        for name in ("dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *STORED):
                raise InputError(f"{name}: found {getattr(self, name)!r}; allowed: {', '.join(STORED)}")
        if self.keep and self.level != "parameters":
            raise InputError(f"keep: found true at level {self.level!r}; allowed: level 'parameters'")
        if self.level != "replicate" and not self.axes:
            raise InputError(f"axes: found none at level {self.level!r}; allowed: the mesh axes that split storage")

    @property
    def split(self) -> bool:
        """Whether storage is split."""
        return self.level != "replicate"

    @property
    def resident(self) -> bool:
        """Whether W stays gathered between steps."""
        return self.level in ("optimizer", "gradients")


def named_level(word: str) -> str:
    """The level, or HYBRID, that ``word`` is a name of; any other word as it is, for the caller to refuse."""
    plain = word.lower().replace("-", "")
    return HYBRID if plain == HYBRID else ALIASES.get(plain, word)


def one_level(word: str, where: str = "level") -> str:
    """The level that ``word`` names; ``where`` begins an error.

    Raises InputError for a word that names none, or chooses axes too.
    """
    level = named_level(word)
    if level == HYBRID:
        raise InputError(f"{where}: found {word!r}, which chooses axes too; allowed: {', '.join(LEVELS)}")
    if level not in LEVELS:
        raise InputError(f"{where}: found {word!r}; allowed: {', '.join(LEVELS)}")
    return level


def hybrid_axes(data_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that HYBRID splits storage over: the last one. Raises InputError where there is one data axis only."""
    if len(data_axes) < 2:
        raise InputError(
            f"level: found {HYBRID!r} on {len(data_axes)} data axis; allowed: two data axes or more, of which the last "
            "splits parameters and the others replicate them ('fsdp' splits over a single one)"
        )
    return data_axes[-1:]


def kept(level: str, keep: bool, reshard_after_forward: bool | None) -> bool:
    """What ``keep`` is where W is, or is not, to be released after forward; None: as ``keep`` says.

    Raises InputError for both words, and for a level that never releases W.
    """
    if reshard_after_forward is None:
        return keep
    if keep:
        raise InputError("reshard_after_forward: found it beside keep; allowed: one of them")
    if level not in ("parameters", HYBRID):
        raise InputError(
            f"reshard_after_forward: found it at level {level!r}; allowed: level 'parameters', which alone releases W"
        )
    return not reshard_after_forward
