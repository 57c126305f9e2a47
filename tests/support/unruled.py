"""Families without a rule table, as tiny configs: what each does that others do not stands beside it."""

from __future__ import annotations

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 40, "initializer_range": 0.2}
NO_DROPOUT = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
DENSE_FIRST = {"first_k_dense_replace": 1}
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}

FAMILIES = {
    "afmoe": {**SMALL, **EXPERTS, **WINDOW, "num_experts": 4, "num_dense_layers": 1},
    "bamba": {**SMALL, **MAMBA, "attn_layer_indices": [1]},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "initializer_range": 0.2},  # eager, ALiBi
    "codegen": {**OLD, **NO_DROPOUT, "n_ctx": 32, "rotary_dim": 4},
    "cohere2": {**SMALL, **WINDOW, "logit_scale": 1.0},
    "deepseek_v2": {**SMALL, **LATENT, **ROUTED, **DENSE_FIRST, "topk_method": "greedy"},
    "deepseek_v3": {**SMALL, **LATENT, **ROUTED, **DENSE_FIRST},  # a router with a persistent buffer
    "diffllama": SMALL,  # differences of two softmaxes
    "doge": SMALL,  # masks that depend on values
    "ernie4_5_moe": {
        **SMALL,
        **EXPERTS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {**SMALL, **WINDOW},
    "falcon_h1": {**SMALL, **MAMBA, "mamba_d_ssm": 64},  # attention and a state space side by side
    "gemma3_text": {**SMALL, **WINDOW, "use_bidirectional_attention": True},
    "glm4": SMALL,
    "gpt_bigcode": {**OLD, **NO_DROPOUT},  # one key/value head
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 3,
        "vocab_size": 40,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "embed_dropout": 0,
        "resid_dropout": 0,
        "attention_dropout": 0,
    },
    "gpt_neox": {**SMALL, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt_oss": {**SMALL, **WINDOW, **LOCAL_EXPERTS},  # eager, sinks
    "granite": {**SMALL, "logits_scaling": 2.0},
    "granitemoe": {**SMALL, **LOCAL_EXPERTS},
    "granitemoehybrid": {**SMALL, **MAMBA, **LOCAL_EXPERTS, "layer_types": ["mamba", "attention"]},
    "jamba": {
        **SMALL,
        **EXPERTS,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "llama4_text": {
        **SMALL,
        "attention_chunk_size": 5,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 40},
    "minimax": {**SMALL, **LOCAL_EXPERTS, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
    "mixtral": {**SMALL, **LOCAL_EXPERTS, "sliding_window": 3},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "vocab_size": 40},
    "olmo3": {**SMALL, **WINDOW},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    "phimoe": {**SMALL, **LOCAL_EXPERTS, "sliding_window": 3},
    "qwen2_moe": {**SMALL, **EXPERTS, "num_experts": 4},
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 4},
    "qwen3_next": {
        **SMALL,
        **EXPERTS,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "recurrent_gemma": {
        **SMALL,
        "lru_width": 32,
        "attention_window_size": 5,
        "block_types": ["recurrent", "attention"],
    },
    "stablelm": SMALL,
    "starcoder2": {**SMALL, "sliding_window": 3},
    "vaultgemma": {**SMALL, **WINDOW},
}
"""Those that train, by the model's own code to 1e-5."""

REFUSED = {
    "apertus": (SMALL, "act_fn"),
    "cpmant": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "dim_head": 8,
            "dim_ff": 48,
            "vocab_size": 40,
        },
        "a loss of the model's own",
    ),
    "xlnet": (  # states -1 positions: no limit
        {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48, "vocab_size": 40},
        "a loss of the model's own",
    ),
}
"""Those that are refused, and a word of the line."""
