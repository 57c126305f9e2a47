"""Adapters, wrappers, hooks and new parameters: right, or refused by name; before a model is parallelized and after."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from support import dense, tiny
from support.ranks import on_ranks
from test_values import WITHOUT_RULES

ONE, TWO = {"data": 1, "tensor": 1}, {"data": 1, "tensor": 2}


class Lora(nn.Module):
    """An adapter as peft makes it: it holds the linear, has its weight, and adds B·A of the same input."""

    def __init__(self, base: nn.Module, rank: int = 4):
        super().__init__()
        self.base_layer = base
        kind = {"bias": False, "dtype": torch.float64}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **kind)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **kind)})

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Extra(nn.Linear):
    """A linear that is another linear, too."""


def wrap(model, name="model.layers.1.mlp.down_proj"):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Lora(model.get_submodule(name)))


def mlp(model):
    return model.model.layers[1].mlp


def replace(parent, name, module):
    setattr(parent, name, module)


BEFORE = {
    "adapter": (wrap, "model.layers.1.mlp.down_proj: found Lora; allowed: Linear"),
    "subclass": (
        lambda model: replace(mlp(model), "up_proj", Extra(96, 144, bias=False)),
        "model.layers.1.mlp.up_proj: found Extra; allowed: Linear",
    ),
    "adapter inside": (
        lambda model: mlp(model).up_proj.add_module("lora_A", nn.Linear(96, 4)),
        "model.layers.1.mlp.up_proj: found Linear; allowed: Linear, as the model has it",
    ),
    "parameter": (
        lambda model: mlp(model).register_parameter("gate", nn.Parameter(torch.ones(1))),
        "model.layers.1.mlp.gate: found a parameter that no rule of 'llama' covers",
    ),
    "module": (
        lambda model: model.model.layers[0].add_module("adapter", nn.Linear(96, 96)),
        "model.layers.0.adapter.weight: found a parameter and 1 more that no rule",
    ),
    "wrapped block": (
        lambda model: replace(model.model.layers[1], "mlp", nn.Sequential(mlp(model))),
        "model.layers.1.mlp.gate_proj: found no such module",
    ),
    "forward": (
        lambda model: replace(mlp(model).up_proj, "forward", lambda x: x),
        "model.layers.1.mlp.up_proj: found hooks or a forward of its own",
    ),
    "hook": (
        lambda model: mlp(model).up_proj.register_forward_hook(lambda *_: None),
        "model.layers.1.mlp.up_proj: found hooks or a forward of its own",
    ),
    "norm": (
        lambda model: replace(model.model, "norm", nn.Identity()),
        "model.norm: found Identity; allowed: norm",
    ),
}


def refused_before(name, live):
    model = build_meta(load_config(tiny.config_path()), "float32")
    if live:
        model = model.to_empty(device="cpu")
    BEFORE[name][0](model)
    kinds = {each: type(module) for each, module in model.named_modules()}
    plan = tiny.plan_of(ONE, "replicate")
    try:
        sw.parallelize(model, dense.mesh_of(**ONE), plan)
    except sw.InputError as error:
        assert kinds == {each: type(module) for each, module in model.named_modules()}  # nothing is changed
        return str(error)
    return "not refused"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_what_the_rule_table_does_not_know_is_refused_before_anything_is_changed(name, live):
    (line,) = on_ranks(1, refused_before, name, live)
    assert line.startswith(BEFORE[name][1]) and "\n" not in line and len(line) <= 300


AFTER = {
    "adapter": (wrap, "model.layers.1.mlp.down_proj: found Lora, put there since parallelize"),
    "adapter on the head": (lambda model: wrap(model, "lm_head"), "lm_head: found Lora, put there since"),
    "wrapped block": (
        lambda model: replace(model.model.layers[1], "mlp", nn.Sequential(mlp(model))),
        "model.layers.1.mlp: found Sequential, put there since",
    ),
    "module": (
        lambda model: model.model.layers[0].add_module("adapter", nn.Linear(96, 96)),
        "model.layers.0.adapter: found Linear, put there since",
    ),
    "gone": (lambda model: mlp(model)._modules.pop("up_proj"), "model.layers.1.mlp.up_proj: found no module"),
    "hook": (
        lambda model: mlp(model).up_proj.register_forward_hook(lambda *_: None),
        "model.layers.1.mlp.up_proj: found a hook; allowed: none on a linear",
    ),
    "parameter": (
        lambda model: mlp(model).register_parameter("gate", nn.Parameter(torch.ones(1))),
        "model.layers.1.mlp.gate: found a parameter put there or taken away since parallelize",
    ),
    "replaced": (
        lambda model: replace(mlp(model).up_proj, "weight", nn.Parameter(torch.zeros(144, 96))),
        "model.layers.1.mlp.up_proj.weight: found a Parameter of shape (144, 96) in the place of a sharded",
    ),
    "assigned": (
        lambda model: model.load_state_dict(
            {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}, assign=True
        ),
        "model.embed_tokens.weight: found a Parameter of shape (240, 96) in the place of a sharded",
    ),
}


def refused_after(name, axes, fallback):
    path = tiny.write_config(WITHOUT_RULES) if fallback else tiny.config_path()
    plan = tiny.plan_of(axes, "sequence-parallel" if axes["tensor"] > 1 else "replicate", path, fallback=fallback)
    model, _ = tiny.build(plan, path)
    ((ids, labels),) = tiny.batches(plan, 1)[0]
    model(input_ids=ids, labels=labels).loss.backward()
    (FALLBACK if fallback else AFTER)[name][0](model)
    try:
        model(input_ids=ids, labels=labels)
    except sw.InputError as error:
        return str(error)
    return "not refused"


FALLBACK = {
    "adapter": (
        lambda model: wrap(model, "model.layers.1.mlp.c_proj"),
        "model.layers.1.mlp.c_proj: found Lora, put there since parallelize",
    ),
    "parameter": AFTER["parameter"],
    "module": AFTER["module"],
}


@pytest.mark.parametrize("axes", [ONE, TWO])
@pytest.mark.parametrize("name", AFTER)
def test_what_is_put_into_a_parallelized_model_is_refused(name, axes):
    for line in on_ranks(axes["tensor"], refused_after, name, axes, False):
        assert line.startswith(AFTER[name][1]) and "\n" not in line and len(line) <= 300


@pytest.mark.parametrize("name", FALLBACK)
def test_what_is_put_into_a_model_without_rules_is_refused(name):
    for line in on_ranks(2, refused_after, name, {"data": 2, "tensor": 1}, True):
        assert line.startswith(FALLBACK[name][1]) and "\n" not in line and len(line) <= 300


def adapted(level):
    """Errors of loss and gradients of a model without rules that holds adapters, over two data ranks."""
    path = tiny.write_config({**WITHOUT_RULES, "sliding_window": None})
    axes = {"data": 2, "tensor": 1}
    plan = tiny.plan_of(axes, "replicate", path, fallback=True, dtype="float64", params={"*": level})
    mesh = dense.mesh_of(**axes)
    with torch.device("cpu"):
        model = type(build_meta(load_config(path), "float64"))(load_config(path)).double()
    wrap(model, "model.layers.1.mlp.c_proj")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(0.2 * dense.random(*parameter.shape, seed=index) + (parameter.dim() == 1))
    reference = copy.deepcopy(model)
    model = sw.parallelize(model, mesh, plan)
    ids = torch.randint(0, 240, (plan.micro_batch, plan.sequence), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(2)[mesh.get_local_rank("data")]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    expected = reference(input_ids=ids, labels=ids).loss
    expected.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    errors = {"loss": dense.error(total, expected)}
    for (name, parameter), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        errors[name] = dense.error(parameter.grad.full_tensor(), other.grad) / other.grad.abs().max().item()
    return errors


@pytest.mark.parametrize("level", ["replicate", "parameters"])
def test_adapters_of_a_model_without_rules_are_parameters_like_others(level):
    for errors in on_ranks(2, adapted, level):
        assert sum("lora" in name for name in errors) == 2 and max(errors.values()) <= 1e-5, errors
