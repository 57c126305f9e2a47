"""Text files → tokens → batches, the same on every rank and for every layout.

A text becomes one long line of tokens, documents in the sorted order of their paths, `END_OF_TEXT` after each. A batch
is cut from it at starts drawn from a generator seeded by (seed, step, micro-batch): the batch of the whole mesh depends
on nothing else, and a data rank takes a contiguous slice of its rows.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright._errors import InputError
from shardwright._replacing import replacing

if TYPE_CHECKING:
    import numpy
    import torch
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
"""The token between documents."""

BYTES = 256
"""Single-byte tokens, which every byte-level vocabulary holds."""

_NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "turtledemo", "__pycache__"}


def standard_library() -> Path:
    """The directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library_text(
    max_files: int | None = None, max_bytes: int | None = None, *, package: str = ""
) -> list[Path]:
    """The sources of the running Python's standard library: ``.py`` files in sorted order, without tests and packages.

    max_files, max_bytes: stop before the file that would exceed either. package: only its files.
    Raises InputError where there is no source.
    """
    root = standard_library()
    if package and not (root / package).is_dir():
        raise InputError(f"text: found no package {package!r} under {root}; allowed: a package of the standard library")
    found: list[str] = []
    for directory, below, names in os.walk(root / package):
        below[:] = [name for name in below if name not in _NO_SOURCE]
        found += [Path(directory, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    found.sort()
    chosen: list[Path] = []
    total = 0
    for name in found[:max_files]:
        total += (root / name).stat().st_size
        if max_bytes is not None and total > max_bytes:
            break
        chosen.append(root / name)
    if not chosen:
        raise InputError(
            f"text: found no Python source under {root}; allowed: a Python that has the source of its library"
        )
    return chosen


def train_tokenizer(
    paths: Iterable[Path | str], vocab_size: int, out_path: Path | str, max_bytes: int | None = None
) -> None:
    """Trains a byte-level BPE tokenizer of exactly ``vocab_size`` tokens and writes it to ``out_path``.

    paths: text files, read in sorted order, so that the result does not depend on the order given.
    max_bytes: how much text to learn from, the last file cut short; None: all of it.
    Raises InputError if ``vocab_size`` is below the 256 bytes and `END_OF_TEXT`, or the text too small for it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size <= BYTES:
        raise InputError(f"vocab_size: found {vocab_size}; allowed: at least {BYTES + 1}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(paths, max_bytes), trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise InputError(f"text: found enough for {size} tokens; allowed: at least the {vocab_size} of the vocabulary")
    with replacing(out_path) as temporary:
        tokenizer.save(str(temporary))


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer file at ``path``; InputError where it cannot be read or knows no `END_OF_TEXT`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"tokenizer: found {path}, which is none ({error}); allowed: a tokenizer.json") from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise InputError(f"tokenizer: found {path} without {END_OF_TEXT}; allowed: a tokenizer that has it")
    return tokenizer


def encode_files(paths: Iterable[Path | str], tokenizer: Tokenizer, out_path: Path | str) -> None:
    """Writes the tokens of the files, in sorted order, `END_OF_TEXT` after each, as one uint32 array (.npy)."""
    import numpy

    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = [
        numpy.asarray([*tokenizer.encode(text, add_special_tokens=False).ids, end], dtype=numpy.uint32)
        for text in _documents(paths)
    ]
    with replacing(out_path) as temporary, open(temporary, "wb") as file:
        numpy.save(file, numpy.concatenate(parts) if parts else numpy.empty(0, numpy.uint32))


@dataclass(frozen=True)
class TokenStream:
    """Batches cut from one long line of tokens.

    tokens: [count] integers; seed: the run's seed.
    """

    tokens: numpy.ndarray
    seed: int

    @classmethod
    def load(cls, path: Path | str, seed: int) -> TokenStream:
        """The stream over what `encode_files` wrote, read through a memory map."""
        import numpy

        return cls(numpy.load(path, mmap_mode="r"), seed)

    def batch_at(
        self, step: int, micro: int, *, batch: int, sequence: int, data_index: int = 0, data_size: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) of one micro-batch for one data rank, int64 [batch / data_size, sequence] each.

        batch: sequences of the micro-batch over the whole mesh. labels[b, s] is the token that follows input_ids[b, s]
        (already shifted; -100 would mark a target to ignore, and none is). Each tensor owns exactly its bytes.
        """
        import numpy
        import torch

        if batch % data_size:
            raise InputError(f"batch: found {batch}; allowed: a multiple of the {data_size} data ranks")
        starts_allowed = len(self.tokens) - sequence
        if starts_allowed < 1:
            raise InputError(f"text: found {len(self.tokens)} tokens; allowed: more than the sequence of {sequence}")
        starts = numpy.random.default_rng((self.seed, step, micro)).integers(0, starts_allowed, size=batch)
        rows = batch // data_size
        mine = starts[data_index * rows : (data_index + 1) * rows]
        windows = numpy.stack([self.tokens[start : start + sequence + 1] for start in mine]).astype(numpy.int64)
        inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def _documents(paths: Iterable[Path | str], max_bytes: int | None = None) -> Iterator[str]:
    """The texts of the files in sorted order, ``max_bytes`` at most in all; what is not UTF-8 is replaced."""
    left = max_bytes
    for path in _sorted(paths):
        if left is not None and left <= 0:
            return
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"text: found {path} ({error.strerror}); allowed: files that can be read") from error
        if left is not None:
            data = data[:left]
            left -= len(data)
        yield data.decode("utf-8", errors="replace")


def _sorted(paths: Iterable[Path | str]) -> Sequence[Path]:
    return [Path(path) for path in sorted({Path(path).as_posix() for path in paths})]
