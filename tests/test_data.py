"""Text → tokens → batches: deterministic, and the same batch however the ranks lie."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from shardwright.errors import InputError
from shardwright.train.data import (
    END_OF_TEXT,
    TOKENIZER_CONFIG,
    TokenStream,
    encode_documents,
    end_token,
    load_tokenizer,
    standard_library,
    standard_library_text,
    train_tokenizer,
)
from shardwright.train.sources import documents

VOCAB = 400


@pytest.fixture(scope="module")
def text() -> list[Path]:
    return standard_library_text(max_bytes=2 * 10**5)


@pytest.fixture(scope="module")
def tokenizer_path(text: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(documents("text", text), VOCAB, path)
    return path


def test_standard_library_text_is_sorted_source_without_tests_and_packages() -> None:
    found = standard_library_text()
    names = [path.relative_to(standard_library()).as_posix() for path in found]
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"site-packages", "test", "tests", "idlelib"} & set(name.split("/")[:-1])]
    assert "json/decoder.py" in names


def test_standard_library_text_keeps_its_limits() -> None:
    assert len(standard_library_text(max_files=5)) == 5
    assert sum(path.stat().st_size for path in standard_library_text(max_bytes=10**5)) <= 10**5
    names = [path.relative_to(standard_library()).as_posix() for path in standard_library_text(package="json")]
    assert names[0] == "json/__init__.py" and all(name.startswith("json/") for name in names)
    with pytest.raises(InputError, match="text: found no package 'nope'"):
        standard_library_text(package="nope")
    with pytest.raises(InputError, match="text"):
        standard_library_text(max_files=0)


def test_tokenizer_is_deterministic_and_of_the_size_asked_for(
    text: list[Path], tokenizer_path: Path, tmp_path: Path
) -> None:
    train_tokenizer(documents("text", reversed(text)), VOCAB, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == tokenizer_path.read_bytes()
    assert load_tokenizer(tokenizer_path).get_vocab_size() == VOCAB
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"]  # no temporary file stays


def test_tokenizer_loses_no_byte(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    line = "def größe(x):\n\treturn '→ 𝔘\x00'\r\n"
    assert tokenizer.decode(tokenizer.encode(line).ids) == line


def test_too_little_text_for_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="text: found enough for"):
        train_tokenizer(["a few words"], 4096, tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="vocab_size: found 256"):
        train_tokenizer(["a few words"], 256, tmp_path / "tokenizer.json")
    assert not (tmp_path / "tokenizer.json").exists()


def test_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer: found"):
        load_tokenizer(tmp_path / "tokenizer.json")


def words(path: Path, ordinary: tuple[str, ...], special: tuple[str, ...]) -> Path:
    """A tokenizer of words that knows these tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(("a", "b", *ordinary))}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("ordinary", "special", "beside", "named", "ends"),
    [
        ((), ("<s>", "</s>"), None, None, "</s>"),  # Llama 2, Mistral
        ((), ("<eos>",), None, None, "<eos>"),  # Gemma
        ((), ("<|begin_of_text|>", "<|end_of_text|>"), None, None, "<|end_of_text|>"),  # Llama 3
        ((), ("<|endoftext|>",), None, None, "<|endoftext|>"),  # GPT-2, Qwen
        (("</s>",), ("<eos>",), None, None, "<eos>"),  # Gemma's vocabulary has tags of HTML
        (("</s>",), (), None, None, "</s>"),
        ((), ("<|endoftext|>", "<|im_end|>"), "<|im_end|>", None, "<|im_end|>"),
        ((), ("<|endoftext|>", "<|im_end|>"), {"content": "<|im_end|>"}, None, "<|im_end|>"),
        ((), ("<|endoftext|>", "<stop>"), "<|endoftext|>", "<stop>", "<stop>"),
    ],
)
def test_documents_end_with_the_tokenizers_own_token(
    ordinary: tuple[str, ...],
    special: tuple[str, ...],
    beside: object,
    named: str | None,
    ends: str,
    tmp_path: Path,
) -> None:
    path = words(tmp_path / "tokenizer.json", ordinary, special)
    if beside is not None:
        (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": beside}))
    tokenizer = load_tokenizer(path)
    assert end_token(tokenizer, path, named) == ends
    encode_documents(["a b", "b"], tokenizer, tmp_path / "tokens.npy", ends)
    end = tokenizer.token_to_id(ends)
    assert numpy.load(tmp_path / "tokens.npy").tolist() == [0, 1, end, 1, end]


def test_an_end_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = words(tmp_path / "tokenizer.json", (), ("<stop>",))
    with pytest.raises(InputError, match=r"found .* without <\|endoftext\|>.*; allowed: .*end_token") as caught:
        end_token(load_tokenizer(path), path)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 250
    with pytest.raises(InputError, match=r"end_token: found '</s>', which .* does not have"):
        end_token(load_tokenizer(path), path, "</s>")


def test_a_tokenizer_learns_from_the_first_bytes_only(tmp_path: Path) -> None:
    train_tokenizer(["aaaa", "aaaa", "zzzz" * 9], 258, tmp_path / "tokenizer.json", max_bytes=8)
    vocabulary = load_tokenizer(tmp_path / "tokenizer.json").get_vocab()
    assert "aa" in vocabulary and "zz" not in vocabulary


def test_documents_stand_in_the_order_given_each_with_its_end(tokenizer_path: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    encode_documents(iter(["import b", "", "import a"]), tokenizer, tmp_path / "tokens.npy")
    tokens = TokenStream.load(tmp_path / "tokens.npy", seed=0).tokens
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    assert tokens.tolist() == tokenizer.encode("import b").ids + 2 * end + tokenizer.encode("import a").ids + end
    assert tokens.dtype == numpy.uint32
    encode_documents([], tokenizer, tmp_path / "none.npy")
    assert numpy.load(tmp_path / "none.npy").shape == (0,)


def test_encoding_holds_one_document_at_a_time(tokenizer_path: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)

    def peak(count: int) -> int:
        tracemalloc.start()
        encode_documents((f"{number} " * 2000 for number in range(count)), tokenizer, tmp_path / "tokens.npy")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(1)  # what is imported on first use
    assert peak(64) < 1.5 * peak(8)
    assert (tmp_path / "tokens.npy").stat().st_size > 64 * 2000


def test_a_document_that_cannot_be_read_leaves_the_old_tokens(tokenizer_path: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "import a"
        raise InputError("second document")

    (tmp_path / "tokens.npy").write_text("old")
    with pytest.raises(InputError, match="second document"):
        encode_documents(broken(), load_tokenizer(tokenizer_path), tmp_path / "tokens.npy")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("tokens.npy", "old")]


def stream(seed: int = 0, count: int = 1000) -> TokenStream:
    return TokenStream(numpy.arange(count, dtype=numpy.uint32), seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
def test_the_batch_does_not_depend_on_the_layout(size: int) -> None:
    whole = stream().batch_at(5, 1, batch=12, sequence=7)
    parts = [stream().batch_at(5, 1, batch=12, sequence=7, data_index=i, data_size=size) for i in range(size)]
    for whole_tensor, of_ranks in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(of_ranks), whole_tensor)
        assert all(tensor.shape == (12 // size, 7) and tensor.dtype == torch.int64 for tensor in of_ranks)


def test_labels_are_the_next_tokens_and_tensors_own_exactly_their_bytes() -> None:
    inputs, labels = stream().batch_at(1, 0, batch=4, sequence=16)
    assert torch.equal(labels, inputs + 1)  # the stream counts up by one
    for tensor in (inputs, labels):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == 4 * 16 * 8


def test_batches_change_with_seed_step_and_micro_batch_only() -> None:
    def first(seed: int, step: int, micro: int) -> torch.Tensor:
        return stream(seed).batch_at(step, micro, batch=8, sequence=4)[0]

    assert torch.equal(first(0, 1, 0), first(0, 1, 0))
    others = [first(1, 1, 0), first(0, 2, 0), first(0, 1, 1), first(0, 0, 1)]
    assert not any(torch.equal(first(0, 1, 0), other) for other in others)


def test_every_window_is_possible_and_none_reads_past_the_end() -> None:
    seen = {int(row[0]) for step in range(50) for row in stream(count=10).batch_at(step, 0, batch=8, sequence=7)[0]}
    assert seen == {0, 1, 2}
    inputs, labels = stream(count=8).batch_at(1, 0, batch=2, sequence=7)
    assert labels[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert inputs[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_text_shorter_than_a_window_and_a_batch_that_does_not_divide() -> None:
    with pytest.raises(InputError, match="data: found 7 tokens"):
        stream(count=7).batch_at(1, 0, batch=2, sequence=7)
    with pytest.raises(InputError, match="batch: found 6; allowed: enough sequences for every one of 4 data ranks"):
        stream().batch_at(1, 0, batch=6, sequence=7, data_size=4)
