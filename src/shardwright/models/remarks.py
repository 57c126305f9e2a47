"""What there is to say of a plan before it runs: what it states and could not be applied, and what is risky in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.families.table import family_of, has_rule
from shardwright.models.positions import check_positions
from shardwright.spec.mesh import size_along
from shardwright.spec.plan import Plan
from shardwright.spec.resolved import unapplied
from shardwright.spec.sharding import Sharding

VANISHES = 2.0**-9
"""A step of AdamW changes each weight by about the learning rate. Of a bfloat16 weight just below 1, as the weights of
norms are, the nearest other values are 2^-8 away: less than half of that is rounded away."""


@dataclass(frozen=True)
class NotApplied:
    """A setting that could not be applied. where: sites or parameter groups, block numbers written as ``*``."""

    setting: str
    where: tuple[str, ...]
    because: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {"setting": self.setting, "where": list(self.where), "because": self.because}

    def __str__(self) -> str:
        return f"not applied: {self.setting} ({', '.join(self.where)}), because {self.because}"


def not_applied(config: Any, plan: Plan) -> list[NotApplied]:
    """Every setting of the plan that does nothing at some site, or for some group, in the order of the model."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for setting, name, because in (*_of_sites(config, plan), *_of_storage(config, plan)):
        found.setdefault((setting, because), {})[re.sub(r"\.\d+(?=\.|$)", ".*", name)] = None
    return [NotApplied(setting, tuple(where), because) for (setting, because), where in found.items()]


def warnings_of(config: Any, plan: Plan, learning_rate: float | None = None) -> list[str]:
    """What may not go as it is meant: one line each. learning_rate: of AdamW, where it is known."""
    found = [check_positions(config, plan.sequence)]
    if plan.stored_dtype == "bfloat16" and learning_rate is not None and learning_rate < VANISHES:
        found.append(
            f"master_dtype: bfloat16 weights about 1, as of norms, do not take steps below 2^-9 ({VANISHES:.2g}), "
            f"and learning_rate is {learning_rate:g}: their updates vanish; master_dtype: float32 keeps them"
        )
    return [line for line in found if line is not None]


Said = tuple[str, str, str]
"""(setting, name of the site or parameter group, because)."""


def _of_sites(config: Any, plan: Plan) -> Iterator[Said]:
    if not has_rule(config):
        return
    family = family_of(config)
    for site in family.sites(config, plan.micro_batch * plan.sequence):
        layout = plan.layout_for(site)
        for setting, because in unapplied(layout, plan.mesh, lookup=site.name == family.embedding):
            yield setting, site.name, because


def _of_storage(config: Any, plan: Plan) -> Iterator[Said]:
    """Levels that split nothing, and what rests on them. Groups are told by the patterns that decide of them."""
    gathered = any(_split(plan, pattern) and stored.level == "parameters" for pattern, stored in plan.params.items())
    for pattern, stored in plan.params.items():
        axes = (stored.axes,) if isinstance(stored.axes, str) else tuple(stored.axes or plan.data_axes)
        if stored.level != "replicate" and not _split(plan, pattern):
            because = f"the axes ({', '.join(axes)}) have one rank" if axes else "no axis splits the data"
            yield f"level: {stored.level}", pattern, because
        elif stored.level != "replicate":
            for axis in axes:
                if axis not in plan.data_axes and plan.mesh[axis] > 1:
                    yield f"axes: {axis}", pattern, "it splits no data: what it splits of W is stored so already"
        if stored.reduce_dtype not in (None, plan.stored_dtype) and size_along(plan.mesh, plan.data_axes) == 1:
            yield f"reduce_dtype: {stored.reduce_dtype}", pattern, "no other rank has a share of its gradients"
    if plan.bucket and size_along(plan.mesh, plan.data_axes) == 1:
        yield f"bucket: {plan.bucket}", "*", "no gradient travels: one rank has all data"
    sites = has_rule(config) and any(
        layout.axes_where("w", "sharded")
        for layout in map(plan.layout_for, family_of(config).sites(config, plan.micro_batch * plan.sequence))
    )
    if "in_flight" in plan.model_fields_set and plan.in_flight > 2 and not gathered and not sites:
        yield f"in_flight: {plan.in_flight}", "*", "no parameter group is gathered in its turn"


def _split(plan: Plan, pattern: str) -> bool:
    """Whether the storage of the parameter groups of a pattern is split over more than one rank."""
    sharding: Sharding = plan.sharding_of(plan.params[pattern])
    return sharding.split and size_along(plan.mesh, sharding.axes) > 1
