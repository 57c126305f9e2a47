"""From a config to a model on the meta device: no weights, no memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import InputError
from shardwright.files.config_file import short
from shardwright.models.config import warnings_held


def of_blocks(config: Any, blocks: Sequence[int]) -> Any:
    """The config of the model that has only these of its blocks."""
    few = copy.deepcopy(config)
    few.num_hidden_layers = len(blocks)
    if getattr(config, "layer_types", None):
        few.layer_types = [config.layer_types[block] for block in blocks]
    return few


def build_meta(config: Any, dtype: str = "float32") -> Any:
    """The Hugging Face causal language model of ``config``, its parameters on the meta device in ``dtype``.

    Raises InputError, one line, where transformers makes no model of it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with warnings_held(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    except Exception as error:  # whatever a model class finds wrong with its config
        raise InputError(
            f"config: found one of which transformers makes no model ({type(error).__name__}: {short(error)}); "
            f"allowed: a config of {config.model_type!r} that is whole"
        ) from None
