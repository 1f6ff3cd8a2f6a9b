"""Fields of published configs that the default config of a family in `transformers` lacks.

A row of docs/models.md is about models as they are published: with their multipliers, caps, windows, biases, norms and
experts. Default configs mostly are such a config; these are the fields where they are not.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
}
_DECODER = {"is_decoder": True}  # an encoder, unless it is asked not to be
_HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# 26B-A4B; 31B has no experts, and E2B and E4B have inputs for each layer, which are refused
_GEMMA4 = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_SECTIONS = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}}
# Step-3.7-Flash: of each four layers the first sees all tokens, with a rope of half its heads; the last two are clamped
_STEP3P7 = {
    "num_hidden_layers": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5,
    "sliding_window": 512,
    "num_sliding_attention_heads": 96,
    "moe_router_scaling_factor": 3.0,
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 2,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 2,
    "swiglu_limits": [0.0] * 6 + [7.0] * 2,
    "swiglu_limits_shared": [0.0] * 6 + [16.0] * 2,
}
# Of each four layers the last has the keys and values of the one before
_MISTRAL_LARGE4 = {
    "num_hidden_layers": 8,
    "kv_source_layers": [0, 1, 2, 2, 4, 5, 6, 6],
    "indexer_types": ["full", "full", "full", "shared"] * 2,
}
# MiniMax-M3: three dense layers with full attention, then indexers and experts
_MINIMAX_M3 = {
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 5,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5,
}
_QWEN4_EXP = {
    "ple_layer_ids": [2],
    "eos_token_id": 2,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
_HALF_ROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_GLM4V = {"text_config": {"rope_parameters": _HALF_ROPE}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "apertus": {"attention_bias": True},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "cohere": {"use_qk_norm": True, "attention_bias": True},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": _WINDOWED,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 500000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
        "d_model": 64,
        "max_seq_len": 64,
    },
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {"attention_bias": True},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "ernie4_5": {"use_bias": True},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [22, 22, 20]}}},
    "falcon_h1": {
        "embedding_multiplier": 5.65,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.4],
        "ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.4],
        "num_hidden_layers": 4,
    },
    "falcon": {"num_attention_heads": 64, "hidden_size": 4096},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    "glm_moe_dsa": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "glm46v": _GLM4V,
    "glm4v": _GLM4V,
    "glm4v_moe": {"text_config": {"rope_parameters": _HALF_ROPE, "head_dim": 128, "routed_scaling_factor": 2.5}},
    "glmga": _GLM4V,
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "granite": _GRANITE,
    "granite_swa": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 1024},
    "granitemoehybrid": {
        **_GRANITE,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "layer_types": _HYBRID,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 8},
    "laguna": {"num_hidden_layers": 4, "layer_types": _WINDOWED, "num_attention_heads_per_layer": [64, 48, 64, 48]},
    "mellum": {"num_hidden_layers": 4, "layer_types": _WINDOWED},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "use_expert_bias": True,
    },
    "qwen2_5_omni_thinker": _SECTIONS,
    "qwen2_5_vl": _SECTIONS,
    "qwen2_vl": _SECTIONS,
    "minimax_m3_vl": {"text_config": _MINIMAX_M3},
    "minimax_m3_vl_text": _MINIMAX_M3,
    "ministral": {"head_dim": 128},
    "mistral_large4": {"text_config": _MISTRAL_LARGE4},
    "mixtral": {"sliding_window": 4096},
    "nemotron": {"num_key_value_heads": 8},
    "olmo": {"clip_qkv": 2.0},
    "olmoe": {"clip_qkv": 2.0},
    "opt": {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "phi3": {"sliding_window": 2047},
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "sliding_window": 2047},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 16},
    "qwen2_moe": {"mlp_only_layers": [0], "norm_topk_prob": False},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "seed_oss": {"attention_bias": True},
    "solar_open": {"routed_scaling_factor": 2.5},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": 4096},
    "step3p7": {"text_config": _STEP3P7},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _DECODER,
    ),
}  # fmt: skip


def build_published_config(model_type: str) -> PretrainedConfig:
    """A config of the size that is published. Raises what `transformers` raises where a family has none."""
    return AutoConfig.for_model(model_type, **PUBLISHED.get(model_type, {}))


# config.json of zai-org/GLM-5.2, as copies of it in public repositories quote it: transformers derives indexer_types
# and mlp_layer_types from what is here, and takes head_dim from qk_rope_head_dim
GLM_5_2: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-05,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_dtype": "float32",
    "ep_size": 1,
    "pretraining_tp": 1,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
