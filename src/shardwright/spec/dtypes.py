"""Element types: every name that a plan, a cluster file, a checkpoint or a command may use, in one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementType:
    """bytes: of an element. safetensors: the name in a safetensors header; None where checkpoints do not hold it.
    short: the command line's short name.
    """

    bytes: int
    safetensors: str | None = None
    short: str | None = None


DTYPES: dict[str, ElementType] = {
    "float64": ElementType(8, "F64", "fp64"),
    "float32": ElementType(4, "F32", "fp32"),
    "float16": ElementType(2, "F16"),
    "bfloat16": ElementType(2, "BF16", "bf16"),
    "float8_e4m3fn": ElementType(1),
    "float8_e5m2": ElementType(1),
    "int64": ElementType(8, "I64"),
    "int32": ElementType(4, "I32"),
    "int16": ElementType(2, "I16"),
    "int8": ElementType(1, "I8"),
    "uint8": ElementType(1, "U8"),
    "bool": ElementType(1, "BOOL"),
}
"""torch's name → what is known of it."""

FLOATS = {name: dtype.bytes for name, dtype in DTYPES.items() if name.startswith(("float", "bfloat"))}
"""Element types in which products are formed → bytes."""

STORED = ("float32", "bfloat16", "float64")
"""Element types in which parameters may be stored, read, and their gradients summed."""

SHORT = {dtype.short: name for name, dtype in DTYPES.items() if dtype.short is not None}
"""The command line's short names → torch's."""
