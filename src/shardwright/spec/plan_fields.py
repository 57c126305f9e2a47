"""The parts of a plan file: a site's layout, how parameters are stored, what is predicted; the axes that they name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    field_validator,
    model_validator,
)

from shardwright.files.messages import FieldError
from shardwright.files.parser import STRICT
from shardwright.files.sizes import SIZES, SizeText, parse_bytes
from shardwright.spec.layout import CHOICES, OPERAND_WORDS, GridLayout
from shardwright.spec.presets import axes_of, preset, presets
from shardwright.spec.sharding import HYBRID, LEVELS, SPELLED, hybrid_axes, kept, named_level

PositiveInt = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
SmallSize = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(parse_bytes, json_schema_input_type=Annotated[int, Field(ge=0)] | SizeText),
    Field(json_schema_extra={"x-allowed": f"0 or a size: {SIZES}"}),
]
"""A size that may be 0."""
Text = Annotated[str, Field(min_length=1)]


def _words(words: Collection[str]) -> Any:
    return Field(json_schema_extra={"enum": list(words)})


class _LayoutFields(BaseModel):
    """GridLayout as a plan file spells it. Types are checked here, words and axes by GridLayout itself."""

    model_config = STRICT

    m: Text | list[Text] = Field(default=[], description="mesh axes that split M, the tokens")
    n: Text | list[Text] = Field(default=[], description="mesh axes that split N, the output features")
    k: Text | list[Text] = Field(default=[], description="mesh axes that split K, the input features")
    x: Annotated[str, _words(OPERAND_WORDS["x"])] | dict[str, Annotated[str, _words(OPERAND_WORDS["x"])]] = Field(
        default="sharded", description="what X [M,K] does on the n axes: one word, or a word for each axis"
    )
    w: Annotated[str, _words(OPERAND_WORDS["w"])] | dict[str, Annotated[str, _words(OPERAND_WORDS["w"])]] = Field(
        default="replicated", description="what W [N,K] does on the m axes: one word, or a word for each axis"
    )
    y: Annotated[str, _words(OPERAND_WORDS["y"])] | dict[str, Annotated[str, _words(OPERAND_WORDS["y"])]] = Field(
        default="sharded", description="what Y [M,N] does on the k axes: one word, or a word for each axis"
    )
    save_x: Annotated[str, _words(CHOICES["save_x"])] = Field(default="shard", description="what backward keeps of X")
    save_w: Annotated[str, _words(CHOICES["save_w"])] = Field(default="shard", description="what backward keeps of W")
    overlap: Annotated[str, _words(CHOICES["overlap"])] = Field(
        default="blocking", description="how communication runs beside the product"
    )
    chunks: int = Field(
        default=0,
        ge=0,
        description="pieces of tokens into which each rank's part of a product is cut; 0 leaves it to the mode",
        json_schema_extra={"x-allowed": "a whole number of at least 0"},
    )
    reduce_dtype: Annotated[str, _words(CHOICES["reduce_dtype"])] = Field(
        default="same", description="the dtype in which partial sums are added; they travel in their own"
    )


def _layout(value: Any) -> GridLayout | str:
    if isinstance(value, GridLayout):
        return value
    if isinstance(value, str):
        preset(value)
        return value
    if isinstance(value, Mapping):
        return GridLayout(**_LayoutFields.model_validate(value).model_dump(exclude_unset=True))
    raise ValueError("neither a preset nor a mapping")


Layout = Annotated[
    GridLayout | str,
    PlainValidator(
        _layout, json_schema_input_type=Annotated[str, Field(json_schema_extra={"enum": list(presets)})] | _LayoutFields
    ),
    PlainSerializer(lambda layout: layout if isinstance(layout, str) else layout.to_dict()),
]


class StoredFields(BaseModel):
    """How a group's parameters are stored over mesh axes."""

    model_config = STRICT

    level: Literal["replicate", "optimizer", "gradients", "parameters", "hsdp"] = Field(
        json_schema_extra={"enum": list(SPELLED), "x-allowed": ", ".join(LEVELS)},
        description="what is split over the axes: nothing, optimizer states, gradients too, or parameters too",
    )
    axes: Text | list[Text] | None = Field(
        default=None, description="mesh axes over which storage is split; null: every data axis of the plan"
    )
    keep: bool = Field(default=False, description="level parameters: W stays gathered from a forward to its backward")
    reduce_dtype: Literal["float32", "bfloat16", "float64"] | None = Field(
        default=None, description="element type in which gradients are added; null: that of the stored parameters"
    )
    bucket: SmallSize | None = Field(
        default=None,
        description="bytes of the buffer in which small gradients travel together; 0: none; null: the plan's",
    )
    reshard_after_forward: bool | None = Field(
        default=None, description="level parameters: false says what keep: true says, true what keep: false says"
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """Levels by their own names, and ``keep`` for ``reshard_after_forward``."""
        if not isinstance(data, Mapping) or not isinstance(data.get("level"), str):
            return data
        data = {**data, "level": named_level(data["level"])}
        after = data.get("reshard_after_forward")
        if isinstance(after, bool):
            if "keep" in data:
                raise FieldError(("reshard_after_forward",), "it beside keep", "one of them")
            del data["reshard_after_forward"]
            data["keep"] = kept(data["level"], False, after)
        return data


def stored_as(value: Any) -> StoredFields:
    if isinstance(value, StoredFields):
        return value
    return StoredFields.model_validate({"level": value} if isinstance(value, str) else value)


Stored = Annotated[
    StoredFields,
    PlainValidator(
        stored_as,
        json_schema_input_type=Annotated[
            str, Field(json_schema_extra={"enum": list(SPELLED), "x-allowed": "one of " + ", ".join(LEVELS)})
        ]
        | StoredFields,
    ),
    PlainSerializer(
        lambda stored: (
            stored.level
            if stored.model_fields_set == {"level"}
            else stored.model_dump(exclude_defaults=True) | {"level": stored.level}
        )
    ),
]


PHASES = ("forward", "loss", "backward", "step")
"""The phases of a training step, in order."""


class Predicted(BaseModel):
    """What a rehearsal of the plan says of one training step."""

    model_config = STRICT

    peak: dict[str, Bytes] = Field(
        description=f"phase ({', '.join(PHASES)}) → most bytes of tensor storage alive in it, on the fullest rank",
        json_schema_extra={"propertyNames": {"enum": list(PHASES)}},
    )
    rank_classes: dict[str, Any] | None = Field(
        default=None, description="class of ranks that do the same → its own figures (bytes)"
    )
    saved: Bytes = Field(description="bytes that the autograd graph holds at the end of forward")
    volume: Bytes = Field(description="bytes that one rank sends in step 1")
    time: float | None = Field(default=None, ge=0, description="seconds of one step; null where it was not computed")

    @field_validator("peak")
    @classmethod
    def _phases(cls, peak: dict[str, int]) -> dict[str, int]:
        check_known(peak, PHASES, "the phase")
        return peak


def check_known(mapping: Mapping[str, Any], allowed: Collection[str], what: str) -> None:
    """Raises FieldError for a key that is not ``allowed``. what: the kind of thing that keys name."""
    for name in mapping:
        if name not in allowed:
            raise FieldError((name,), f"{what} {name!r}", ", ".join(allowed))


def data_axes(mesh: Mapping[str, int], layouts: Mapping[str, GridLayout | str]) -> tuple[str, ...]:
    """Mesh axes that some layout uses as m (they split tokens for good), in mesh order."""
    used = {axis for layout in layouts.values() for axis in axes_of(layout, "m")}
    return tuple(axis for axis in mesh if axis in used)


def check_axes(
    mesh: Mapping[str, int], layouts: Mapping[str, GridLayout | str], params: Mapping[str, StoredFields]
) -> None:
    """Raises FieldError where a layout or a way to store parameters names an axis that the mesh does not have."""
    names = "the mesh's axes (" + ", ".join(mesh) + ")"
    for pattern, layout in layouts.items():
        if isinstance(layout, str):
            for axis in sorted(axes_of(layout, "axes") - set(mesh)):
                raise FieldError(("layouts", pattern), f"{layout}, which uses the axis {axis!r}", names)
        else:
            for role in ("m", "n", "k"):
                for axis in getattr(layout, role):
                    if axis not in mesh:
                        raise FieldError(("layouts", pattern, role), f"the axis {axis!r}", names)
    for pattern, stored in params.items():
        axes = (stored.axes,) if isinstance(stored.axes, str) else stored.axes or ()
        for axis in axes:
            if axis not in mesh:
                raise FieldError(("params", pattern, "axes"), f"the axis {axis!r}", names)
        if stored.keep and stored.level != "parameters":
            raise FieldError(("params", pattern, "keep"), f"true at level {stored.level}", "level parameters")


def with_axes(params: Mapping[str, StoredFields], found: tuple[str, ...]) -> dict[str, StoredFields]:
    """``params`` with axes for those at level HYBRID; found: the data axes.

    Raises FieldError where there is one data axis only, or the axes that are stated are all of them.
    """
    chosen = dict(params)
    for pattern, stored in params.items():
        if stored.level != HYBRID:
            continue
        axes = hybrid_axes(found) if stored.axes is None else stored.axes
        if not set(found) - ({axes} if isinstance(axes, str) else set(axes)):
            raise FieldError((pattern, "axes"), f"all data axes at level {HYBRID}", "a part of them, or level fsdp")
        listed = axes if isinstance(axes, str) else list(axes)
        chosen[pattern] = StoredFields(
            **stored.model_dump(exclude_unset=True) | {"level": "parameters", "axes": listed}
        )
    return chosen
