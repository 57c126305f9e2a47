"""Packages that only some runs need, each installed by an extra of the same name as the word that asks for it."""

from __future__ import annotations

from importlib.util import find_spec

from shardwright.files.messages import FieldError, Key

PACKAGES = {"tensorboard": "tensorboard", "parquet": "pyarrow"}
"""Extra → the package that it brings."""


def check_extra(extra: str, key: Key = ()) -> None:
    """Raises InputError, for the field ``key``, where the package of ``extra`` is not installed."""
    package = PACKAGES[extra]
    if find_spec(package) is None:
        raise FieldError(
            key, f"{extra} without the package {package}", f"{extra} after pip install 'shardwright[{extra}]'"
        )
