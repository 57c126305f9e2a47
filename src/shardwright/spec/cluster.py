"""The cluster file: how many devices there are, what one holds and computes, and what the links between them carry."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from shardwright.errors import DoesNotFit, InputError
from shardwright.files.messages import FieldError
from shardwright.files.old_words import Renamed
from shardwright.files.parser import STRICT, Version2, read_yaml
from shardwright.files.plain_yaml import write_yaml
from shardwright.files.sizes import SIZES, SizeText, format_bytes, parse_bytes
from shardwright.spec.collectives import COLLECTIVES

Size = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(parse_bytes, json_schema_input_type=Annotated[int, Field(ge=1)] | SizeText),
    Field(json_schema_extra={"x-allowed": f"a size above 0: {SIZES}"}),
]


SHIPPED = Path(__file__).parent / "clusters"
"""Cluster files of common machines, one host each: data-sheet values, their sources named in them."""

RENAMED = (Renamed(("links", "measured", "*"), "beside", "contention"),)
"""Fields that had another word in version 1 of a cluster file."""

HEADER = (
    "shardwright cluster: hosts of equal devices, what one computes and what the links carry.\n"
    "Edit by hand as you like; it is checked again when loaded. Sizes are bytes, times are seconds."
)


class Product(BaseModel):
    """One product Y[m,n] = X[m,k] · W[n,k]ᵀ that was measured on one device, its neighbours at work too."""

    model_config = STRICT

    dtype: str = Field(description="element type")
    m: int = Field(ge=1, description="rows of X, a count")
    n: int = Field(ge=1, description="rows of W, a count")
    k: int = Field(ge=1, description="columns of both, a count")
    flops: float = Field(gt=0, description="floating-point operations per second")


class Device(BaseModel):
    """One accelerator, or one process of a host without any."""

    model_config = STRICT

    name: str = Field(min_length=1, description="name that reports use")
    memory: Size = Field(description="memory of one device: bytes, or a size such as 80GiB (GiB = 2^30 bytes)")
    flops: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        default=None, description="element type → most floating-point operations per second of one device"
    )
    efficiency: float = Field(
        default=1.0, gt=0, le=1, description="share of these that large products reach, a ratio without a unit"
    )
    memory_bandwidth: float | None = Field(
        default=None, gt=0, description="bytes per second between one device and its memory; null: no limit"
    )
    overhead: float = Field(default=0.0, ge=0, description="seconds that one operator takes whatever its size")
    products: list[Product] = Field(default=[], description="products that were measured; they go before flops")


class Link(BaseModel):
    """One kind of link, as one rank sees it in one direction while its neighbours send too.

    seconds = max(least, latency + bytes / bandwidth)
    """

    model_config = STRICT

    latency: float = Field(ge=0, description="seconds from the start of a message to its first byte")
    bandwidth: float = Field(gt=0, description="bytes per second")
    least: float = Field(default=0.0, ge=0, description="seconds that any message takes, however small")


class Measured(BaseModel):
    """A collective over groups of one shape, all groups of the mesh at once.

    seconds = max(least, latency + sent / bandwidth)
    """

    model_config = STRICT

    kind: Annotated[str, Field(json_schema_extra={"enum": list(COLLECTIVES)})] = Field(description="collective")
    ranks: int = Field(ge=2, description="ranks of a group")
    hosts: int = Field(ge=1, description="hosts that a group spans")
    latency: float = Field(ge=0, description="seconds of a message beside those of its bytes")
    bandwidth: float = Field(gt=0, description="bytes per second that one rank sends")
    least: float = Field(default=0.0, ge=0, description="seconds that any message takes, however small")
    contention: float = Field(
        default=1.0,
        ge=1,
        description="times as long, it and a product, while both run, a ratio without a unit; 1: not slowed down",
    )
    residual: float = Field(
        default=0.0, ge=0, description="median distance of a measurement from the fit, a ratio without a unit"
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in COLLECTIVES:
            raise FieldError((), kind, ", ".join(COLLECTIVES))
        return kind


class Links(BaseModel):
    """The links of a cluster."""

    model_config = STRICT

    within_host: Link = Field(description="between two devices of one host")
    between_hosts: Link | None = Field(
        default=None, description="between devices of two hosts; null where there is one host"
    )
    measured: list[Measured] = Field(
        default=[], description="collectives that were measured (shardwright profile); they go before the links"
    )


class Cluster(BaseModel):
    """Hosts of equal devices. The file is YAML; an error is one line."""

    model_config = STRICT

    version: Version2 = Field(description="version of this schema")
    hosts: int = Field(ge=1, description="hosts")
    devices_per_host: int = Field(ge=1, description="devices on each host")
    device: Device = Field(description="one device")
    links: Links | None = Field(default=None, description="links between devices; null where times are not asked for")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster in a file; raises InputError, one line."""
        return read_yaml(path, cls, RENAMED)

    @classmethod
    def named(cls, text: str) -> Cluster:
        """``"16384xH100-80GB"``: so many devices of a kind that ships with shardwright, on hosts as its file has them.

        Fewer devices than a host holds are one smaller host. Raises InputError, one line.
        """
        count, _, kind = text.strip().partition("x")
        kinds = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
        if not re.fullmatch(r"[1-9][0-9]{0,8}", count) or kind not in kinds:
            raise InputError(
                f"devices: found {text!r}; allowed: a number, x and a kind, such as 8xH100-80GB ({', '.join(kinds)})"
            )
        host, devices = cls.load(SHIPPED / f"{kind}.yaml"), int(count)
        each = min(devices, host.devices_per_host)
        if devices % each:
            raise InputError(
                f"devices: found {text!r}; allowed: fewer than {each} devices of {kind}, or whole hosts of {each}"
            )
        return host.model_copy(update={"hosts": devices // each, "devices_per_host": each})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as YAML, whole or not at all."""
        write_yaml(path, self.model_dump(mode="json", exclude_none=True), HEADER)

    @property
    def devices(self) -> int:
        """Devices of all hosts together."""
        return self.hosts * self.devices_per_host

    def check_devices(self, ranks: int, where: str) -> None:
        """Raises InputError unless ``ranks`` are the devices of this cluster, which ``where`` names."""
        if self.devices != ranks:
            raise InputError(
                f"mesh: found {ranks} ranks for the {self.devices} devices of {where}; "
                f"allowed: a mesh of exactly {self.devices}"
            )

    def check_peak(self, peak: int, what: str) -> None:
        """Raises DoesNotFit where a device holds less than ``peak`` bytes, which ``what`` tells of."""
        if peak > self.memory_bytes:
            raise DoesNotFit(
                f"does not fit: {what} {format_bytes(peak)} ({peak:,} bytes), "
                f"a device holds {format_bytes(self.memory_bytes)} ({self.memory_bytes:,} bytes)"
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of one device's memory."""
        return self.device.memory
