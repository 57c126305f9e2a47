"""What a model consists of: before it is parallelized only what its rule table knows, afterwards what was made then.

Adapters and other modules that are put into a model, before or after, would be dropped, or would multiply one rank's
part of an activation by weights whose gradients nobody sums up. So what is not understood is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.errors import InputError
from shardwright.families.family import Family
from shardwright.layers.embedding import VocabParallelEmbedding
from shardwright.linear.grid_linear import GridLinear
from shardwright.spec.site import Site

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_modules(model: Any, family: Family, sites: Mapping[Site, Any]) -> None:
    """Raises InputError where a module that will be replaced is not of the kind that the rule table means.

    Nor may anything hang on it that would go with it (hooks, a forward of its own), nor any parameter be left over.
    """
    covered: set[str] = set()
    for name, kind in _replaced(model, family, sites):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise InputError(
                f"{name}: found no such module; allowed: a model as {family.model_type!r} has it"
            ) from None
        if not _is(module, kind):
            raise InputError(
                f"{name}: found {type(module).__name__}; allowed: {kind}, as the model has it (no adapter, no wrapper)"
            )
        if "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS):
            raise InputError(f"{name}: found hooks or a forward of its own; allowed: none, since it will be replaced")
        biased = kind == "Linear" or isinstance(module, nn.LayerNorm)
        covered |= {f"{name}.{parameter}" for parameter in (("weight", "bias") if biased else ("weight",))}
    left = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in covered]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise InputError(
            f"{left[0]}: found a parameter{more} that no rule of {family.model_type!r} covers; allowed: the model's own"
        )


def _replaced(model: Any, family: Family, sites: Mapping[Site, Any]) -> Iterator[tuple[str, str]]:
    """(name, kind) of every module that is replaced."""
    for site in sites:
        if site.name == family.embedding:
            yield site.name, "Embedding"
        else:
            yield from ((linear.name, "Linear") for linear in site.linears)
    if family.positions is not None:
        yield family.positions, "Embedding"
    yield family.final_norm, "norm"
    yield from ((name, "Dropout") for name in family.dropouts)
    for index, _ in enumerate(model.get_submodule(family.blocks)):
        block = f"{family.blocks}.{index}"
        yield from ((f"{block}.{name}", "norm") for name in (*family.block_norms, *family.head_norms))
        yield from ((f"{block}.{name}", "Dropout") for name in family.block_dropouts)


def _is(module: nn.Module, kind: str) -> bool:
    named, known = type(module).__name__, type(module).__module__.partition(".")[0] in ("torch", "transformers")
    if module._modules or not known:
        return False
    if kind == "Linear":
        return type(module) is nn.Linear or named == "Conv1D"
    if kind == "norm":
        return named.endswith("Norm")
    return isinstance(module, nn.Embedding if kind == "Embedding" else nn.Dropout)


class Structure:
    """A forward pre-hook: the model has the modules, and parameters of the names, that it had when this was made.

    That the parameters themselves are the same is looked at by their store. A module that ``torch.compile`` has wrapped
    is itself.
    """

    def __init__(self, model: nn.Module):
        self._held = [
            (name, module, dict(module._modules), [*module._parameters]) for name, module in model.named_modules()
        ]
        model.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Raises InputError for the first module that is another one, a new parameter, or a hook on a site."""
        for name, module, children, parameters in self._held:
            if module._modules != children:
                _check_children(name, module, children)
            if [*module._parameters] != parameters:
                key = sorted({*module._parameters} ^ {*parameters})[0]
                raise InputError(
                    f"{_join(name, key)}: found a parameter put there or taken away since parallelize; allowed: those "
                    "that were there"
                )
            if isinstance(module, (GridLinear, VocabParallelEmbedding)) and any(getattr(module, h) for h in HOOKS):
                raise InputError(
                    f"{name}: found a hook; allowed: none on a linear or embedding that lies on the mesh, where a hook "
                    "sees one rank's part"
                )


def _check_children(name: str, module: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    now: dict[str, Any] = {key: getattr(child, "_orig_mod", child) for key, child in module._modules.items()}
    for key in (*now, *children):
        if now.get(key) is not children.get(key):
            kind = "no module" if now.get(key) is None else type(now[key]).__name__
            raise InputError(
                f"{_join(name, key)}: found {kind}, put there since parallelize; allowed: the modules that were there "
                "(no adapter, no wrapper)"
            )


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
