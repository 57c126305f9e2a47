"""Where a plan meets a model: sizes divide, attention has whole sequences, and every pattern decides something."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.families.family import Family
from shardwright.families.table import family_of, has_rule
from shardwright.files.patterns import check_patterns
from shardwright.models.forward import (
    check_config,
)
from shardwright.models.positions import check_positions
from shardwright.models.structure import check_modules
from shardwright.spec.layout import GridLayout
from shardwright.spec.plan import Plan
from shardwright.spec.site import Site, check_divides, check_heads
from shardwright.unsharding.shard import param_groups_of


def check_fits(model: Any, plan: Plan) -> dict[Site, GridLayout]:
    """Site → layout, checked: sizes divide, attention has whole sequences, and every pattern decides something.

    Empty for a model without a rule table. Raises InputError where the plan does not fit the model.
    """
    check_positions(model.config, plan.sequence)
    check_config(model.config)
    parameters = [name for name, _ in model.named_parameters()]
    if plan.fallback and not has_rule(model.config):
        check_patterns("params", plan.params, dict.fromkeys(map(param_groups_of(model), parameters)), "parameter group")
        return {}
    family = family_of(model.config)
    layouts = resolve(family, model.config, plan)
    check_modules(model, family, layouts)
    own = {site.name for site, layout in layouts.items() if layout.axes_where("w", "sharded")}
    param_groups = dict.fromkeys(map(param_group_finder(family, layouts), parameters))
    blocks = [f"{family.blocks}.{index}" for index in range(model.config.num_hidden_layers)]
    check_patterns("layouts", plan.layouts, [site.name for site in layouts], "site")
    check_patterns("params", plan.params, [name for name in param_groups if name not in own], "parameter group")
    check_patterns("recompute", plan.recompute, blocks, "block")
    return layouts


def param_group_finder(family: Family, layouts: Mapping[Site, GridLayout]) -> Callable[[str], str]:
    """Parameter → the name of its parameter group.

    Blocks are parameter groups, and modules outside of them; the weights of a site whose layout shards W are one too.
    """
    block = re.compile(rf"{re.escape(family.blocks)}\.\d+(?=\.)")
    own = {
        f"{linear.name}.weight": site.name
        for site, layout in layouts.items()
        if layout.axes_where("w", "sharded")
        for linear in site.linears
    }

    def param_group(parameter: str) -> str:
        module = parameter.rpartition(".")[0]
        if parameter in own:
            return own[parameter]
        inside = block.match(module)
        return inside.group() if inside else module

    return param_group


def resolve(family: Family, config: Any, plan: Plan) -> dict[Site, GridLayout]:
    """Site → layout for the whole model, checked: sizes divide, and attention has whole sequences."""
    sites = family.sites(config, plan.micro_batch * plan.sequence)
    layouts = {site.name: plan.layout_for(site) for site in sites}
    for site in sites:
        check_divides(site, layouts[site.name], plan.mesh)
        if site.name.endswith(f"{family.attention}.qkv"):
            check_heads(site, layouts[site.name], plan.batch_axes, plan.mesh)
    return {site: layouts[site.name] for site in sites}
