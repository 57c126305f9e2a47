"""What is composed from a few blocks is what all of them do, to the byte (ACCEPTANCE E2)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.certificate.certify import largest
from shardwright.errors import InputError
from shardwright.families.table import family_of
from shardwright.models.config import load_config
from shardwright.pricing import compose
from shardwright.pricing.compose import Known, composed_of
from shardwright.simulate.rank_classes import rank_classes
from shardwright.space.problem import Choice, plan_of
from shardwright.space.space import MODES, Structure, structures
from shardwright.spec.plan import Plan
from shardwright.stretching.bucket_period import cap_of
from support import tiny
from support.marks import slow_where

PLANS = 50
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
GPT2 = {"n_embd": 64, "n_head": 8, "n_positions": 32, "vocab_size": 64}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = {
    "llama": SIZES,
    "gpt2": {**GPT2, **NO_DROPOUT},
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
}
DRAWN = ("llama",) * 7 + tuple(FAMILIES)[1:]
"""Every tenth plan is one of gpt2, of qwen3, of gemma2, whose blocks are of two types in turn."""


def drawn(number: int) -> tuple[Path, Plan]:
    """Plan ``number``: a structure, one or two runs of blocks, and what else a plan may say.

    Every fifth one has a bucket, and blocks enough to leave some out.
    """
    rng = random.Random(f"compose/{number}")
    family = DRAWN[number % len(DRAWN)]
    bins = 2 if number % 5 == 1 else 0
    blocks = 16 if bins else 8 if family == "gemma2" else rng.choice((6, 6, 6, 9))
    odd = {"vocab_size": 61} if rng.random() < 0.1 else {}  # ranks are not all alike
    path = tiny.write_config(
        {
            "model_type": family,
            **FAMILIES[family],
            **odd,
            ("n_layer" if family == "gpt2" else "num_hidden_layers"): blocks,
        }
    )
    config = load_config(path)
    batch, sequence, wanted = 12, rng.choice((4, 6)), rng.choice((1, 1, 1, 2, 3))
    rules = family_of(config)
    allowed = [
        each
        for each in structures(rules, config, rng.choice((1, 2, 4, 4, 8)), batch, sequence)
        if each.accumulation == wanted and each.bins == bins
    ]
    if not allowed:  # eight ranks that split tokens, and so few sequences
        return drawn(number + 1000)
    two = [each for each in allowed if each.l > 1]
    structure = rng.choice(two if two and rng.random() < 0.3 else allowed)
    settings = {
        "micro_batch": batch,
        "sequence": sequence,
        "backend": rng.choice(("nccl", "gloo")),
        "in_flight": rng.choice((1, 1, 2)),
        "dtype": rng.choice(("float32", "bfloat16")),
        "master_dtype": rng.choice((None, "float32")),
    }
    if settings["dtype"] == settings["master_dtype"]:
        settings["master_dtype"] = None
    base = tiny.plan_of({"data": 1}, "replicate", path, **settings)
    sites = rules.sites(config, batch // wanted * sequence)
    plan = plan_of(structure, base, rules, sites, choices(rng, structure, blocks))
    if not bins:
        return path, plan
    try:
        return path, plan.evolve(bucket=cap_of(config, plan, bins))
    except InputError:  # gradients of biases and norms go different ways
        return drawn(number + 1000)


def choices(rng: random.Random, structure: Structure, blocks: int) -> list[Choice]:
    """What the blocks choose: one thing, or the first few another; recomputation of none, of a prefix, or of all."""

    def one() -> tuple:
        return rng.choice(structure.modes), rng.choice(structure.modes)

    turn = rng.choice((0, 0, 1, 1, blocks - 5, blocks))
    first, rest = one(), one()
    if rng.random() < 0.5:
        rest = first
    word = rng.choice(("none", "block"))
    return [(*(first if number < turn else rest), word if number < turn else "none") for number in range(blocks)]


@pytest.mark.parametrize("number", slow_where(lambda number: number not in (0, 1, 2, 4, 6), range(PLANS)))
def test_e2_the_composed_prediction_is_the_full_rehearsal(number):
    path, plan = drawn(number)
    composed = composed_of(load_config(path), plan)
    traces = [sw.rehearse(path, plan, each.representative) for each in rank_classes(path, plan)]
    assert composed.phase_peaks == largest(trace.phase_peaks for trace in traces)
    assert composed.saved == max(trace.saved_bytes for trace in traces)
    assert composed.sent == max(trace.sent_bytes for trace in traces)


def test_mixes_that_differ_in_their_counts_share_a_rehearsal(monkeypatch):
    path = tiny.config_path(**SIZES, num_hidden_layers=14)
    config, rules = load_config(path), family_of(load_config(path))
    structure = Structure(1, 2, 2, 1, "split", "parameters", False, 1)
    base, sites = tiny.plan_of({"data": 1}, "replicate", path, micro_batch=4, sequence=8), rules.sites(config, 4 * 8)

    def plan_with(recomputed: int):
        mode = MODES[4]
        chosen = [(mode, mode, "block")] * recomputed + [(mode, mode, "none")] * (14 - recomputed)
        return plan_of(structure, base, rules, sites, chosen)

    alone = composed_of(config, plan_with(8))
    known: Known = {}
    composed_of(config, plan_with(4), known=known)  # a run that is kept whole has its unit elsewhere
    first = composed_of(config, plan_with(6), known=known)
    monkeypatch.setattr(compose, "rehearse_few", lambda *_: pytest.fail("rehearsed again"))
    assert composed_of(config, plan_with(8), known=known) == alone != first


@pytest.mark.parametrize("recomputed", range(7))
def test_a_plan_says_of_every_block_what_it_chose(recomputed):
    """Half of them too: a pattern for the rest must not hide them."""
    path = tiny.config_path(**SIZES, num_hidden_layers=6)
    config, rules = load_config(path), family_of(load_config(path))
    structure = Structure(1, 2, 2, 1, "split", "parameters", False, 1)
    sites = rules.sites(config, 4 * 8)
    base = tiny.plan_of({"data": 1}, "replicate", path, micro_batch=4, sequence=8)
    for first, second in ((MODES[0], MODES[5]), (MODES[4], MODES[1])):
        chosen = [(first, second, "block")] * recomputed + [(second, first, "none")] * (6 - recomputed)
        plan = plan_of(structure, base, rules, sites, chosen)
        for number, (attention, mlp, word) in enumerate(chosen):
            block = f"{rules.blocks}.{number}"
            assert plan.recompute_for(block) == word, plan.recompute
            for site in sites:
                if site.name.startswith(f"{block}."):
                    mode = attention if "attn" in site.name else mlp
                    assert plan.layout_for(site) == structure.layout(site, mode), site.name
