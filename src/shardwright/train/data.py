"""Documents → tokens → batches, the same on every rank and for every layout.

Documents become one long line of tokens, in the order given, the end token after each. A batch is cut from it at starts
drawn from a generator seeded by (seed, step, micro-batch): the batch of the whole mesh depends on nothing else, and a
data rank takes a contiguous slice of its rows.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from shardwright.errors import InputError
from shardwright.files.replacing import replacing
from shardwright.spec.mesh import chunk

if TYPE_CHECKING:
    import numpy
    import torch
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
"""The end token of tokenizers that are trained here."""

END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""End tokens of public tokenizers, in the order in which they are looked for where nothing names one."""

TOKENIZER_CONFIG = "tokenizer_config.json"
"""The file beside a tokenizer.json that names its special tokens."""

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
    documents: Iterable[str], vocab_size: int, out_path: Path | str, max_bytes: int | None = None
) -> None:
    """Trains a byte-level BPE tokenizer of exactly ``vocab_size`` tokens and writes it to ``out_path``.

    documents: the text to learn from, taken one at a time.
    max_bytes: how much of it, as UTF-8, the last document cut short; None: all of it.
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
    tokenizer.train_from_iterator(_first_bytes(documents, max_bytes), trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise InputError(f"text: found enough for {size} tokens; allowed: at least the {vocab_size} of the vocabulary")
    with replacing(out_path) as temporary:
        tokenizer.save(str(temporary))


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer file at ``path``; InputError where it cannot be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"tokenizer: found {path}, which is none ({error}); allowed: a tokenizer.json") from error
    return tokenizer


def end_token(tokenizer: Tokenizer, path: Path | str, named: str | None = None) -> str:
    """The token that ends a document: the one that is named; else ``eos_token`` of the `TOKENIZER_CONFIG` beside
    ``path``, where the tokenizer was read; else the first of `END_TOKENS` that it has, special tokens before others.

    Raises InputError where there is none, or the tokenizer does not have the one that is named.
    """
    if named is None:
        named = _eos_beside(Path(path))
    if named is not None:
        if tokenizer.token_to_id(named) is None:
            raise InputError(
                f"end_token: found {named!r}, which {path} does not have; allowed: a token of the tokenizer"
            )
        return named
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    known = [token for token in END_TOKENS if tokenizer.token_to_id(token) is not None]
    if not known:
        raise InputError(
            f"tokenizer: found {path} without {', '.join(END_TOKENS)}; allowed: one that has such a token, or "
            "whose end token is named (data: {end_token: …})"
        )
    return next((token for token in known if token in special), known[0])


def _eos_beside(path: Path) -> str | None:
    """What the `TOKENIZER_CONFIG` beside a tokenizer file names as the end token, if there is one and it does."""
    config = path.with_name(TOKENIZER_CONFIG)
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{config}: found {error}; allowed: a {TOKENIZER_CONFIG}") from None
    token = fields.get("eos_token") if isinstance(fields, dict) else None
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, out_path: Path | str, ending: str = END_OF_TEXT
) -> None:
    """Writes the tokens of the documents, ``ending`` after each, as one uint32 array (.npy), whole or not at all.

    One document and its tokens are in memory at a time.
    """
    import numpy
    from numpy.lib import format as npy

    end = tokenizer.token_to_id(ending)

    def write_header(file: BinaryIO, count: int) -> None:
        header = {"descr": npy.dtype_to_descr(numpy.dtype(numpy.uint32)), "fortran_order": False, "shape": (count,)}
        npy.write_array_header_1_0(file, header)  # leaves room for the count to grow

    with replacing(out_path) as temporary, open(temporary, "wb") as file:
        write_header(file, 0)
        count = 0
        for document in documents:
            tokens = numpy.asarray([*tokenizer.encode(document, add_special_tokens=False).ids, end], numpy.uint32)
            file.write(tokens.tobytes())
            count += len(tokens)
        file.seek(0)
        write_header(file, count)


@dataclass(frozen=True)
class TokenStream:
    """Batches cut from one long line of tokens.

    tokens: [count] integers; seed: the run's seed.
    """

    tokens: numpy.ndarray
    seed: int

    @classmethod
    def load(cls, path: Path | str, seed: int) -> TokenStream:
        """The stream over what `encode_documents` wrote, read through a memory map."""
        import numpy

        return cls(numpy.load(path, mmap_mode="r"), seed)

    def check_length(self, sequence: int, key: str = "data") -> None:
        """Raises InputError, for the field ``key``, unless a window of ``sequence`` tokens and one more can be cut."""
        if len(self.tokens) <= sequence:
            raise InputError(f"{key}: found {len(self.tokens)} tokens; allowed: more than the sequence of {sequence}")

    def batch_at(
        self, step: int, micro: int, *, batch: int, sequence: int, data_index: int = 0, data_size: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) of one micro-batch for one data rank, int64 [rows, sequence] each.

        batch: sequences of the micro-batch over the whole mesh; a rank gets ⌈batch / data_size⌉ of them, the last
        ranks fewer where that does not divide. labels[b, s] is the token that follows input_ids[b, s]
        (already shifted; -100 would mark a target to ignore, and none is). Each tensor owns exactly its bytes.
        """
        import numpy
        import torch

        first, end = chunk(batch, data_size, data_index)
        if chunk(batch, data_size, data_size - 1)[0] == batch:  # the last rank's piece is empty
            raise InputError(
                f"batch: found {batch}; allowed: enough sequences for every one of {data_size} data ranks, "
                f"cut into pieces of {-(-batch // data_size)}"
            )
        self.check_length(sequence)
        starts = numpy.random.default_rng((self.seed, step, micro)).integers(0, len(self.tokens) - sequence, size=batch)
        windows = numpy.stack([self.tokens[start : start + sequence + 1] for start in starts[first:end]]).astype(
            numpy.int64
        )
        inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def _first_bytes(documents: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """The documents up to ``max_bytes`` of UTF-8 in all; what the cut leaves of a character is replaced."""
    if max_bytes is None:
        yield from documents
        return
    left = max_bytes
    for document in documents:
        if left <= 0:
            return
        data = document.encode()[:left]
        left -= len(data)
        yield data.decode("utf-8", errors="replace")
