"""What is wrong with a model's config comes out as one line of at most 300 characters, never as a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from support import tiny
from test_cli import refused

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
OPT = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
COUNT = "a whole number of at least 1"
DECODER = "allowed: a decoder of text"

LEFT_OUT = object()

# Fields, changes to them, and what the line must say after the path.
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (tiny.FIELDS, {"model_type": "llava"}, "model_type: found 'llava', which has a vision_config beside"),
    (tiny.FIELDS, {"model_type": "gemma3"}, "model_type: found 'gemma3', which has a vision_config beside"),
    (tiny.FIELDS, {"model_type": "t5"}, f"model_type: found 't5', an encoder and a decoder; {DECODER}"),
    (tiny.FIELDS, {"model_type": "bart"}, f"model_type: found 'bart', an encoder and a decoder; {DECODER}"),
    (tiny.FIELDS, {"model_type": "vit"}, f"model_type: found 'vit', which is no causal language model; {DECODER}"),
    (tiny.FIELDS, {"model_type": "lama"}, "model_type: found 'lama' (did you mean llama?); allowed: a model_type that"),
    (tiny.FIELDS, {"model_type": "x" * 999}, "model_type: found 'xxx"),
    (tiny.FIELDS, {"model_type": 3}, "model_type: found 3; allowed: the model_type of a Hugging Face model"),
    (tiny.FIELDS, {"model_type": LEFT_OUT}, "model_type: found nothing; allowed: the model_type of"),
    (
        tiny.FIELDS,
        {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
        "auto_map: found code that comes with the config; allowed: none: only transformers' own models are run",
    ),
    (tiny.FIELDS, {"auto_map": {"AutoConfig": "c.C"}, "model_type": "own"}, "auto_map: found code that comes with the"),
    (tiny.FIELDS, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config: found quantized"),
    (tiny.FIELDS, {"num_hidden_layers": 0}, f"num_hidden_layers: found 0; allowed: {COUNT}"),
    (tiny.FIELDS, {"num_attention_heads": 0}, f"num_attention_heads: found 0; allowed: {COUNT}"),
    (tiny.FIELDS, {"num_key_value_heads": 0}, f"num_key_value_heads: found 0; allowed: {COUNT}"),
    (tiny.FIELDS, {"vocab_size": -1}, f"vocab_size: found -1; allowed: {COUNT}"),
    (tiny.FIELDS, {"head_dim": 0}, f"head_dim: found 0; allowed: {COUNT}"),
    (GPT2, {"n_layer": 0}, f"n_layer: found 0; allowed: {COUNT}"),
    *((tiny.FIELDS, {name: LEFT_OUT}, f"{name}: found nothing; allowed: {COUNT}") for name in
      ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")),
    (GPT2, {"n_embd": LEFT_OUT}, f"n_embd: found nothing; allowed: {COUNT}"),
    (OPT, {"num_hidden_layers": LEFT_OUT}, f"num_hidden_layers: found nothing; allowed: {COUNT}"),
    (tiny.FIELDS, {"hidden_size": "many"}, f"hidden_size: found 'many'; allowed: {COUNT}"),
    (tiny.FIELDS, {"hidden_size": None}, f"hidden_size: found null; allowed: {COUNT}"),
    (tiny.FIELDS, {"num_key_value_heads": 5}, "num_key_value_heads: found 5; allowed: a divisor of the 12 "),
    (tiny.FIELDS, {"hidden_size": 97}, ""),
    (tiny.FIELDS, {"hidden_act": "nope"}, ""),
    (tiny.FIELDS, {"rope_scaling": {"rope_type": "yarn"}}, ""),
    (tiny.FIELDS, {"layer_types": ["full_attention"]}, ""),
    (tiny.FIELDS, {"max_position_embeddings": "far"}, ""),
    (tiny.FIELDS, {"rms_norm_eps": "small"}, ""),
    (GPT2, {"n_positions": 0}, f"n_positions: found 0; allowed: {COUNT}"),
    (GPT2, {"activation_function": 3}, ""),
    (OPT, {"num_attention_heads": 3}, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "changes", "line"),
    CASES,
    ids=[
        f"{fields['model_type']}-{json.dumps(changes, default=lambda _: 'left out')[:40]}"
        for fields, changes, _ in CASES
    ],
)
def test_a_config_that_is_wrong_is_one_line(
    fields: dict[str, Any], changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    changed = {**fields, **changes}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not LEFT_OUT}))
    told = refused(
        "rehearse",
        path,
        "--layout",
        "replicate",
        "--mesh",
        "data=1",
        "--micro-batch",
        "1",
        "--sequence",
        "8",
        "--fallback",
    )
    assert len(told) <= 300 + len("error: \n") and "found " in told and "; allowed: " in told
    assert line in told, told


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", '"llama"', "null", "[" * 9999, "\xff"], ids=lambda text: repr(text[:9])
)
def test_what_is_no_config_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config.json: found .*; allowed: a") as caught:
        load_config(tmp_path / "config.json")
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_code_of_a_config_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    fields = {**tiny.FIELDS, "model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="auto_map"):
        load_config(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, {"pad_token_id": 999}], ids=str
)
def test_what_transformers_only_warns_of_and_then_makes_no_model_of(changes: dict[str, Any]) -> None:
    config = load_config(tiny.write_config({**tiny.FIELDS, **changes}))
    with pytest.raises(InputError, match="config: found one of which transformers makes no model") as caught:
        build_meta(config)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)
