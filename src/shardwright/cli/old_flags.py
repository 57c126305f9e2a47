"""Options that earlier versions spelled otherwise: read as the ones that took their place, hidden from the help."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from shardwright.cli.common import exit_status
from shardwright.errors import InputError


def renamed_flags(words: Mapping[str, str]) -> type[TyperCommand]:
    """A command that takes the old options too; one line on standard error says what to write.

    words: old option → new option. Both together are refused.
    """

    class Renamed(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            with exit_status():
                return super().parse_args(ctx, [_current(argument, args, words) for argument in args])

    return Renamed


def _current(argument: str, arguments: list[str], words: Mapping[str, str]) -> str:
    name, equals, value = argument.partition("=")
    if name not in words:
        return argument
    if any(other.partition("=")[0] == words[name] for other in arguments):
        raise InputError(f"{name}: found it beside {words[name]}; allowed: {words[name]} alone")
    print(f"warning: {name} is called {words[name]} now; write {words[name]}", file=sys.stderr, flush=True)
    return words[name] + equals + value
