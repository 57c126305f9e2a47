"""A Hugging Face config.json, read and checked: what is not understood is refused before a model is made of it.

No code that comes with a config is ever run: whatever ``auto_map`` names is refused.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.files.config_file import config_file, read_config, short
from shardwright.files.messages import found_text

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""What a config must state as far as its family has it, under these names or its own (``n_embd``): transformers would
make it up."""

OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
"""What follows from the others where it is left out or null."""

PARTS_OF_TEXT = ("text_config", "attn_config", "ffn_config")
"""Configs inside a config that are no other kind of input."""

COUNT = "a whole number of at least 1"
Refuse = Callable[[str, str, str], InputError]
"""(field, what was found, what is allowed) → the error."""


def load_config(path: str | Path) -> Any:
    """A Hugging Face config from its config.json (or from the directory that holds one).

    Raises InputError, one line, for what is no config of a decoder of text, for one with code of its own or quantized
    weights, and for sizes that are left out or no whole numbers of at least 1.
    """
    from transformers import AutoConfig

    path = config_file(path)
    fields = read_config(path)
    model_type = fields.pop("model_type")

    def refuse(field: str, found: str, allowed: str) -> InputError:
        return InputError(f"{path}: {field}: found {found}; allowed: {allowed}")

    kind = _kind(model_type, refuse)
    _check_sizes(kind, fields, refuse)
    try:
        with warnings_held():
            return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # whatever a config class finds wrong with its fields
        raise InputError(f"{path}: found {short(error)}; allowed: a Hugging Face config") from None


class _Held(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def warnings_held() -> Iterator[None]:
    """What transformers logs inside is shown when the block has ended well; where it raises, its error says it."""
    logger, held = logging.getLogger("transformers"), _Held()
    before, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [held], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagates
    for record in held.records:
        logger.handle(record)


def _kind(model_type: str, refuse: Refuse) -> Any:
    """The config class of that name; a decoder of text alone is wanted."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING_NAMES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise refuse("model_type", short(repr(model_type)) + hint, "a model_type that transformers has")
    kind, allowed = CONFIG_MAPPING[model_type], "a decoder of text, such as llama"
    if getattr(kind, "is_encoder_decoder", False):
        raise refuse("model_type", f"{model_type!r}, an encoder and a decoder", allowed)
    beside = [name for name in kind.sub_configs if name not in PARTS_OF_TEXT]
    if beside:
        raise refuse("model_type", f"{model_type!r}, which has a {beside[0]} beside text", allowed)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise refuse("model_type", f"{model_type!r}, which is no causal language model", allowed)
    return kind


def _check_sizes(kind: Any, fields: Mapping[str, Any], refuse: Refuse) -> None:
    """Sizes as they stand in the file, before a config class computes with them."""
    known = {}
    for name in (*SIZES, *OPTIONAL_SIZES):
        own = kind.attribute_map.get(name, name)
        stated = [each for each in (own, name) if each in fields]
        if not stated:
            if name in SIZES and getattr(kind, own, None) is not None:
                raise refuse(own, "nothing", COUNT)
            continue
        value = known[name] = fields[stated[0]]
        optional = name in OPTIONAL_SIZES or (hasattr(kind, own) and getattr(kind, own) is None)
        if (optional and value is None) or isinstance(value, list):  # some have one for each block
            continue
        if type(value) is not int or value < 1:
            raise refuse(stated[0], found_text(value), COUNT)
    heads, shared = known.get("num_attention_heads"), known.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise refuse("num_key_value_heads", str(shared), f"a divisor of the {heads} attention heads")
