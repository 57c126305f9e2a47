"""The plan file: one model, one mesh, and every choice that makes a training step what it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from shardwright.errors import InputError
from shardwright.files.messages import FieldError
from shardwright.files.old_words import VERSION, Renamed
from shardwright.files.parser import STRICT, Version2, check, read_yaml
from shardwright.files.plain_yaml import write_yaml
from shardwright.spec.dtypes import DTYPES
from shardwright.spec.layout import GridLayout
from shardwright.spec.mesh import world_size
from shardwright.spec.model_ref import ModelRef, sha256_of
from shardwright.spec.plan_fields import (
    Layout,
    PositiveInt,
    Predicted,
    SmallSize,
    Stored,
    StoredFields,
    check_axes,
    check_known,
    data_axes,
    stored_as,
    with_axes,
)
from shardwright.spec.presets import axes_of, preset
from shardwright.spec.sharding import Sharding
from shardwright.spec.site import Site

HEADER = (
    "shardwright plan: how one model lies on one mesh, and what a step is predicted to need.\n"
    "Edit by hand as you like; it is checked again when loaded. Sizes are bytes, times are seconds."
)

RENAMED = (Renamed((), "batch", "micro_batch"),)
"""Fields that had another word in version 1 of a plan file."""

RECOMPUTE = ("none", "block")
"""What backward may compute again of a block."""


class Plan(BaseModel):
    """One training step, stated: model, mesh, sizes, layouts, buffers, and what it is predicted to need.

    ``layouts``, ``params`` and ``recompute`` map shell patterns (``*``, ``?``, ``[…]``) to a choice; the first pattern
    in file order that matches a name wins.
    """

    model_config = STRICT

    version: Version2 = Field(description="version of this schema")
    model: ModelRef = Field(description="the model that the plan is for")
    mesh: dict[str, PositiveInt] = Field(
        min_length=1, description="mesh axis → ranks along it, in the mesh's order (the first axis varies slowest)"
    )
    backend: Literal["gloo", "nccl"] = Field(
        default="gloo", description="backend of torch.distributed that the run declares"
    )
    micro_batch: int = Field(
        ge=1,
        description="sequences per micro-batch, over the whole mesh; m axes that do not divide it split sequences",
    )
    accumulation: int = Field(default=1, ge=1, description="micro-batches per step")
    sequence: int = Field(ge=1, description="tokens per sequence")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="element type of parameters and activations"
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of the initial weights and of the order of the data",
        json_schema_extra={"x-allowed": "a whole number from 0 to 2^63 - 1"},
    )
    layouts: dict[str, Layout] = Field(
        min_length=1, description="pattern of site names → the name of a preset, or the fields of a GridLayout"
    )
    params: dict[str, Stored] = Field(
        default={"*": stored_as("replicate")},
        description="pattern of names of parameter groups (blocks, and modules outside of them) → how parameters are "
        "stored over the data axes: a level, or its fields",
    )
    in_flight: int = Field(
        default=2,
        ge=1,
        description="how many parameter groups may be gathered at once: the one at work, and those on their way",
        json_schema_extra={"x-allowed": "a whole number of at least 1"},
    )
    bucket: SmallSize = Field(
        default=0,
        description="bytes of the buffer in which small gradients travel together, while backward runs; 0: each "
        "group's travel with the group",
    )
    master_dtype: Literal["float32", "bfloat16", "float64"] | None = Field(
        default=None,
        description="element type in which parameters are stored and updated; null: dtype; where it is left out and "
        "dtype is bfloat16: float32",
    )
    fallback: bool = Field(
        default=False,
        description="run a model without a rule table all the same: data parallel, its linears unsplit",
    )
    recompute: dict[str, str] = Field(
        default={},
        description="pattern of block names → what backward computes again: none of it, or the whole block",
        json_schema_extra={"additionalProperties": {"type": "string", "enum": list(RECOMPUTE)}},
    )
    arena: dict[str, list[PositiveInt]] | None = Field(
        default=None,
        description="element type → sizes in bytes of the slots that buffers are leased from, largest first; "
        "null: unlimited",
    )
    predicted: Predicted | None = Field(default=None, description="what a rehearsal of this plan says; null before one")
    objective: float | None = Field(default=None, description="seconds of one step by the planner's model")
    bound: float | None = Field(default=None, description="seconds that no plan can beat, by the planner's model")
    gap: float | None = Field(default=None, ge=0, description="(objective − bound) / objective, a ratio without a unit")
    solve_time: float | None = Field(default=None, ge=0, description="seconds that the planner took, all included")

    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @model_validator(mode="before")
    @classmethod
    def _masters(cls, data: Any) -> Any:
        """Updates vanish in low precision: unless told otherwise, parameters are stored in float32."""
        if isinstance(data, Mapping) and data.get("dtype") == "bfloat16" and "master_dtype" not in data:
            return {**data, "master_dtype": "float32"}
        return data

    @field_validator("mesh")
    @classmethod
    def _axis_names(cls, mesh: dict[str, int]) -> dict[str, int]:
        for axis in mesh:
            if not axis.isidentifier():
                raise FieldError((axis,), f"the axis name {axis!r}", "a name of letters, digits and _, such as data")
        return mesh

    @field_validator("params")
    @classmethod
    def _hybrid(cls, params: dict[str, StoredFields], info: ValidationInfo) -> dict[str, StoredFields]:
        if not {"mesh", "layouts"} <= info.data.keys():
            return params  # what is wrong with those is told
        return with_axes(params, data_axes(info.data["mesh"], info.data["layouts"]))

    @field_validator("recompute")
    @classmethod
    def _available(cls, choices: dict[str, str]) -> dict[str, str]:
        for pattern, choice in choices.items():
            if choice not in RECOMPUTE:
                raise FieldError((pattern,), f"{choice!r}, which is not available yet", ", ".join(RECOMPUTE))
        return choices

    @field_validator("arena")
    @classmethod
    def _slots(cls, arena: dict[str, list[int]] | None) -> dict[str, list[int]] | None:
        check_known(arena or {}, DTYPES, "the element type")
        for dtype, sizes in (arena or {}).items():
            for index in range(1, len(sizes)):
                if sizes[index] > sizes[index - 1]:
                    raise FieldError(
                        (dtype, index), f"{sizes[index]} after {sizes[index - 1]}", "slot sizes in bytes, largest first"
                    )
        return arena

    @model_validator(mode="after")
    def _axes_exist(self, info: ValidationInfo) -> Plan:
        check_axes(self.mesh, self.layouts, self.params)
        if info.context:
            self._directory = info.context["directory"]
        return self

    # Files

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a file, checked anew; raises InputError, one line.

        The SHA-256 of the model's config is compared where that file exists.
        """
        return read_yaml(path, cls, RENAMED)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as YAML, whole or not at all; the config's path is stored relative to the plan file."""
        data = self.model_dump(exclude={name for name in ANSWERS if getattr(self, name) is None})
        directory = os.path.dirname(os.path.abspath(path))
        data["model"]["config"] = Path(os.path.relpath(self.config_path, directory)).as_posix()
        write_yaml(path, data, HEADER)

    @property
    def config_path(self) -> Path:
        """The model's config.json, absolute."""
        return Path(os.path.abspath(self._directory / self.model.config))

    # In memory

    @classmethod
    def for_config(
        cls,
        config_path: str | os.PathLike[str],
        *,
        mesh: Mapping[str, int],
        layout: GridLayout | str,
        micro_batch: int,
        sequence: int,
        **rest: Any,
    ) -> Plan:
        """A plan with one layout (or preset name) for all sites.

        config_path: a Hugging Face config.json, or a directory that holds one. mesh: axis → ranks along it.
        micro_batch: sequences per micro-batch over the whole mesh. sequence: tokens per sequence. rest: further fields.
        """
        path = Path(os.path.abspath(config_path))
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise InputError(f"config: found no file {os.fspath(config_path)!r}; allowed: a Hugging Face config.json")
        fields: dict[str, Any] = {
            "version": VERSION,
            "model": {"config": path.name, "sha256": sha256_of(path)},
            "mesh": dict(mesh),
            "micro_batch": micro_batch,
            "sequence": sequence,
            "layouts": {"*": layout},
        }
        return check(fields | rest, cls, "plan", context={"directory": path.parent})

    def evolve(self, **changes: Any) -> Plan:
        """This plan with some fields changed, checked again. ``predicted`` stays unless it is among the changes."""
        return check(
            {name: getattr(self, name) for name in self.model_fields_set} | changes,
            type(self),
            "plan",
            context={"directory": self._directory},
        )

    def __eq__(self, other: object) -> bool:
        """Equal fields, with the same config file however its path is written."""
        if not isinstance(other, Plan):
            return NotImplemented
        return self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]  # its mappings do not hash

    def _identity(self) -> dict[str, Any]:
        fields = dict(self)
        orders = [[*fields[name]] for name in ("mesh", "layouts", "params", "recompute")]
        return fields | {"model": (self.config_path, self.model.sha256), "orders": orders}

    # Questions

    def differs_from(self, other: Plan) -> str | None:
        """The first field in which the two state another step, or None; what is predicted, and slots, do not count."""
        mine, its = self._identity(), other._identity()
        counted = (name for name in type(self).model_fields if name not in (*ANSWERS, "arena"))
        for name in counted:
            if mine[name] != its[name] or (isinstance(mine[name], dict) and [*mine[name]] != [*its[name]]):
                return name
        return None

    def recompute_for(self, block: str) -> str:
        """What backward computes again of the block of that name: the first pattern that matches, else ``none``."""
        return next((policy for pattern, policy in self.recompute.items() if fnmatchcase(block, pattern)), "none")

    def sharding_for(self, param_group: str) -> Sharding:
        """How the group's parameters are stored: as the first pattern that matches says, else whole."""
        return self.sharding_of(self.stored_for(param_group))

    def sharding_of(self, stored: StoredFields | None) -> Sharding:
        """How parameters are stored of which ``params`` says this."""
        dtype = self.dtype if self.master_dtype not in (None, self.dtype) else None
        if stored is None:
            return Sharding(dtype=dtype, bucket=self.bucket)
        if stored.level == "replicate":
            return Sharding(dtype=dtype, reduce_dtype=stored.reduce_dtype, bucket=self._bucket_of(stored))
        axes = (stored.axes,) if isinstance(stored.axes, str) else tuple(stored.axes or self.data_axes)
        if not axes:  # no axis splits data: nothing to split storage over
            return Sharding(dtype=dtype, bucket=self.bucket)
        return Sharding(stored.level, axes, stored.keep, dtype, stored.reduce_dtype, self._bucket_of(stored))

    def stored_for(self, param_group: str) -> StoredFields | None:
        """What the first pattern that matches the group's name says of its parameters, or None."""
        return next((stored for pattern, stored in self.params.items() if fnmatchcase(param_group, pattern)), None)

    def _bucket_of(self, stored: StoredFields) -> int:
        return self.bucket if stored.bucket is None else stored.bucket

    @property
    def stored_dtype(self) -> str:
        """Element type of the stored parameters."""
        return self.master_dtype or self.dtype

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over the whole mesh and all micro-batches."""
        return self.micro_batch * self.accumulation

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return world_size(self.mesh)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that some layout uses as m (they split tokens for good), in mesh order."""
        return data_axes(self.mesh, self.layouts)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Of the axes that every layout uses as m, those that split the batch, in mesh order: as long as it divides.

        The others split the tokens of its sequences.
        """
        roles = [axes_of(layout, "m") for layout in self.layouts.values()]
        left, found = self.micro_batch, []
        for axis, ranks in self.mesh.items():
            if left % ranks == 0 and all(axis in role for role in roles):
                left //= ranks
                found.append(axis)
        return tuple(found)

    def check_world_size(self, ranks: int) -> None:
        """Raises InputError unless ``ranks`` processes fill the mesh."""
        if ranks != self.world_size:
            shape = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
            raise InputError(
                f"mesh: {shape} needs {self.world_size} ranks, found {ranks}; "
                f"allowed: {self.world_size} ranks, or a mesh whose sizes multiply to {ranks}"
            )

    def layout_for(self, site: Site) -> GridLayout:
        """The layout of a site: that of the first pattern that matches its name, a preset applied to the site."""
        for pattern, layout in self.layouts.items():
            if fnmatchcase(site.name, pattern):
                return preset(layout)(site) if isinstance(layout, str) else layout
        raise InputError(f"layouts: found no pattern for the site {site.name}; allowed: patterns that match every site")


ANSWERS = ("predicted", "objective", "bound", "gap", "solve_time")
"""Fields that state what was found out about a plan, not what it does; left out of a file while they are not known."""
