"""Sizes in bytes, as people write them: whole bytes, or a number with a binary unit (1 GiB = 2^30 bytes)."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from shardwright.errors import InputError
from shardwright.files.messages import found_text, short

UNITS: dict[str, int] = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Bytes of each unit that sizes are written in."""

SIZES = "whole bytes, or a number with B, KiB, MiB, GiB or TiB, such as 72GiB"


SizeText = Annotated[str, Field(pattern=rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(UNITS)})?\s*$")]
"""A size as files may hold it, for their schemas."""


def parse_bytes(size: str | int, key: str = "size") -> int:
    """Bytes of ``"72GiB"``, ``"1.5 MiB"``, ``"512"`` or 512; ``key`` is the name that an error bears.

    Decimal units are refused, since 72GB is read as 72·10^9 by some and as 72·2^30 by others.
    """

    def fault(found: str, allowed: str = SIZES) -> InputError:
        return InputError(f"{key}: found {found}; allowed: {allowed}")

    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise fault(found_text(size))
    if isinstance(size, int):
        if size < 0:
            raise fault(str(size))
        return size
    match = re.fullmatch(r"([0-9]{1,30})(\.[0-9]{1,30})?\s*([A-Za-z]*)", size.strip(), re.ASCII)
    if not match:
        raise fault(short(size))
    whole, fraction, unit = str(match[1]), str(match[2] or ""), str(match[3] or "B")
    if unit not in UNITS:
        meant = {name.lower(): name for name in UNITS} | {name.lower().replace("i", ""): name for name in UNITS}
        meant |= {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB"}
        if unit.lower() not in meant:
            raise fault(short(size))
        name = meant[unit.lower()]
        power = UNITS[name].bit_length() - 1
        raise fault(short(size), f"{whole}{fraction}{name}, where 1 {name} = 2^{power} bytes ({SIZES})")
    denominator: int = 10 ** len(fraction[1:])
    numerator = int(whole + fraction[1:]) * UNITS[unit]
    if numerator % denominator:
        if unit == "B":
            raise fault(short(size))
        return round(numerator / denominator)
    return numerator // denominator


def format_bytes(count: int) -> str:
    """``512 B`` exactly, larger sizes with two decimals: ``1.50 GiB`` (1 GiB = 2^30 bytes)."""
    sign, size = ("-" if count < 0 else ""), abs(count)
    if size < 1024:
        return f"{sign}{size} B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if name == "TiB" or round(size / UNITS[name], 2) < 1024:
            break
    return f"{sign}{size / UNITS[name]:.2f} {name}"
