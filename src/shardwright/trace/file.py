"""A trace on disk: gzip-compressed JSON, strings told once, read without executing anything."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.trace.events import Alloc, Collective, Event, Free, Mark, Op, Storage, Wait

FORMAT, VERSION = "shardwright.trace", 1
_KINDS: dict[str, type] = {"op": Op, "collective": Collective, "wait": Wait, "alloc": Alloc, "free": Free, "mark": Mark}
_TAGS = {kind: tag for tag, kind in _KINDS.items()}


def save(
    path: str | Path, events: list[Event], storages: list[Storage], saved: list[int], arena: dict[str, list[int]]
) -> None:
    """Writes to a temporary file beside ``path``, then renames it."""
    path = Path(path)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "events": [[_TAGS[type(event)], *astuple(event)] for event in events],
        "storages": [astuple(storage) for storage in storages],
        "saved": saved,
        "arena": arena,
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
            packed.write(json.dumps(document, separators=(",", ":")).encode())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | Path) -> tuple[list[Event], list[Storage], list[int], dict[str, list[int]]]:
    """Raises InputError in one line where the file is missing, damaged, or no trace of this version."""
    try:
        with gzip.open(path, "rb") as packed:
            document = json.loads(packed.read())
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"{document['format']!r} version {document['version']!r}")
        events = [_KINDS[tag](*map(_frozen, fields)) for tag, *fields in document["events"]]
        storages = [Storage(*fields) for fields in document["storages"]]
        return events, storages, list(document["saved"]), dict(document["arena"])
    except FileNotFoundError:
        raise InputError(f"{path}: found no file; allowed: a trace written by Trace.save") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: found {error}; allowed: a {FORMAT} file of version {VERSION}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
