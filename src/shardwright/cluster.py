"""The cluster file: how many devices there are, what one holds and computes, and what the links between them carry."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from shardwright._files import SIZES, STRICT, SizeText, Version1, parse_bytes, read_yaml

Size = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(parse_bytes, json_schema_input_type=Annotated[int, Field(ge=1)] | SizeText),
    Field(json_schema_extra={"x-allowed": f"a size above 0: {SIZES}"}),
]


class Device(BaseModel):
    """One accelerator, or one process of a host without any."""

    model_config = STRICT

    name: str = Field(min_length=1, description="name that reports use")
    memory: Size = Field(description="memory of one device: bytes, or a size such as 80GiB (GiB = 2^30 bytes)")
    flops: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        default=None, description="element type → most floating-point operations per second of one device"
    )


class Link(BaseModel):
    """One kind of link, as one rank sees it in one direction."""

    model_config = STRICT

    latency: float = Field(ge=0, description="seconds from the start of a message to its first byte")
    bandwidth: float = Field(gt=0, description="bytes per second")


class Links(BaseModel):
    """The links of a cluster."""

    model_config = STRICT

    within_host: Link = Field(description="between two devices of one host")
    between_hosts: Link | None = Field(
        default=None, description="between devices of two hosts; null where there is one host"
    )


class Cluster(BaseModel):
    """Hosts of equal devices. The file is YAML; an error is one line."""

    model_config = STRICT

    version: Version1 = Field(description="version of this schema")
    hosts: int = Field(ge=1, description="hosts")
    devices_per_host: int = Field(ge=1, description="devices on each host")
    device: Device = Field(description="one device")
    links: Links | None = Field(default=None, description="links between devices; null where times are not asked for")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster in a file; raises InputError, one line."""
        return read_yaml(path, cls)

    @property
    def devices(self) -> int:
        """Devices of all hosts together."""
        return self.hosts * self.devices_per_host

    @property
    def memory_bytes(self) -> int:
        """Bytes of one device's memory."""
        return self.device.memory
