"""A tiny random model of every family, with every feature of the family switched on, and weights that tell mistakes
apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny import VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from errors import UserError
from models.architecture.lookup import get_tensor_parallel_plan

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # scores and logits away from zero, so that what happens to them shows
}
_WINDOW = 8  # tokens: far shorter than the samples
_ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.0, 4.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.5,
}

# model_type -> fields of its config in addition to the common sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 56,
        "num_local_experts": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": _WINDOW,
        "floor_scale": 8,  # positions at which attention is scaled
        "attn_scale": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mistral": {"sliding_window": _WINDOW, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 2},
    "qwen3": {
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": _WINDOW,
        "max_window_layers": 3,
    },
    "gemma2": {
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 24,
    },
    "phi3": {"sliding_window": _WINDOW, "rope_parameters": _ROPE_LONG},
    "mpt": {"d_model": 48, "n_heads": 6, "n_layers": 4, "max_seq_len": 256, "expansion_ratio": 4},
    "gpt2": {
        "n_positions": 256,
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "rope_parameters": {**_ROPE_YARN, "truncate": False},
    },
    "olmo2": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
        "rope_parameters": {**_ROPE_YARN, "mscale_all_dim": 1.0, "mscale": 1.0},
    },
}
# Of 24 tokens, 32 heads of an indexer: with few, a score may be 0, and equal to others
_INDEXED = {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 16}
FAMILIES["deepseek_v32"] = {**FAMILIES["deepseek_v3"], **_INDEXED}
FAMILIES["glm_moe_dsa"] = {**FAMILIES["deepseek_v3"], **_INDEXED, "indexer_types": ["full", "shared"] * 2}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GROUPED = {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2, "topk_group": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}

# Mixtures of experts without a file in models/, likewise.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": _WINDOW},
    "qwen2_moe": {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": {**_EXPERTS, "num_experts": 8, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True},
    "glm4_moe": {
        **_GROUPED,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {**_GROUPED, **_LATENT, "num_key_value_heads": 4},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "hy_v3": {**_EXPERTS, "num_experts": 8, "head_dim": 16},
    "solar_open": {**_GROUPED, "head_dim": 16, "n_group": 1},
    "exaone_moe": {**_EXPERTS, "num_experts": 8, "head_dim": 16, "sliding_window": _WINDOW},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.0},
    "phimoe": {
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": _WINDOW,
        "router_jitter_noise": 0.0,  # it draws among experts that are nearly as good
        "input_jitter_noise": 0.0,
    },
    "deepseek_v2": {
        **_GROUPED,
        **_LATENT,
        "num_key_value_heads": 4,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 2},
    "dots1": {**_GROUPED, "head_dim": 16, "first_k_dense_replace": 1, "norm_topk_prob": True},
}
# Two heads of values for each of keys. A larger epsilon: what a query finds of the first keys is often next to nothing,
# and divided by its own size it would carry rounding errors of any size
_DELTA = {
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA = {"state_size": 4, "time_step_rank": 3}
_MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_KIMI = {
    **_LATENT,
    "q_lora_rank": None,
    "num_key_value_heads": 4,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}

# Families with layers that carry a state from token to token, likewise; small chunks, or short rows are mostly padding.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_EXPERTS,
        **_DELTA,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, "num_experts": 8, "shared_expert_intermediate_size": 40},
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": _KIMI,
    "bailing_hybrid": {**_KIMI, "q_lora_rank": 24, "num_expert_group": 2, "topk_group": 1},
    "minimax": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "block_size": 8,
        "full_attn_alpha_factor": 1.5,
        "linear_attn_beta_factor": 0.5,
        "mlp_alpha_factor": 1.2,
    },
    "jamba": {
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        **_GROUPED,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 40,
    },
    "falcon_h1": {
        **_MAMBA2,
        "mamba_d_ssm": 96,
        "mamba_rms_norm": True,
        "head_dim": 16,
        "key_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.5, 1.0, 1.5, 1.0, 0.8],
        "mlp_multipliers": [0.5, 1.5],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
    },
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "head_dim": 16,
        "sliding_window": _WINDOW,
    },
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "zamba": {
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
        "attention_hidden_size": 96,
        "attention_head_dim": 24,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 6,
        "chunk_size": 8,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16, "router_hidden_size": 16},
    "inkling_text": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": _WINDOW,
        "d_rel": 4,
        "rel_extent": 32,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "rwkv": {"attention_hidden_size": 48, "context_length": 256},
    "xlstm": {"embedding_dim": 48, "num_blocks": 4, "num_heads": 4, "chunk_size": 16},
    "recurrent_gemma": {
        "lru_width": 48,
        "attention_window_size": _WINDOW,
        "block_types": ["recurrent", "attention"],
        "head_dim": 16,
    },
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2

# Other families without a file in models/, likewise; a name that is not a model_type is a variant of one. Keys that are
# not rotated by positions have no bias here: a softmax does not see it, and its gradient is rounding alone.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
        },
    },
    "gpt_neox": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "gpt_neox-sequential": {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "falcon": {"multi_query": True, "parallel_attn": True, "bias": True},
    "falcon-new": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-alibi": {
        "model_type": "falcon",
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "num_attention_heads": 6,
    },
    "bloom": {"n_layer": 4, "n_head": 6, "apply_residual_connection_post_layernorm": True},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {
        "logit_scale": 0.25,
        "sliding_window": _WINDOW,
        "layer_types": _SLIDING_AND_FULL,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo3": {
        "sliding_window": _WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "attention_bias": True,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE_YARN, "attention_factor": 1.2}},
    },
    "ministral3": {
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "rope_parameters": {**_ROPE_YARN, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8},
    },
    "phi": {"qk_layernorm": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "stablelm": {
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "starcoder2": {"sliding_window": _WINDOW},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": _WINDOW},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "opt": {
        "ffn_dim": 80,
        "dropout": 0.0,
        "init_std": 0.15,
        "word_embed_proj_dim": 32,
        "enable_bias": False,
        "do_layer_norm_before": False,
        "activation_function": "gelu",  # an input of a ReLU next to zero is on either side of it by rounding
        "_remove_final_layer_norm": False,
    },
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "window_size": _WINDOW,
        "num_layers": 4,
        "num_heads": 4,
    },
}
_COMMON = ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
ALL = {**FAMILIES, **MIXTURES, **HYBRIDS, **OTHERS}
_OWN_SIZES = ("mpt", "gpt2")  # families that name their sizes themselves


def has_sharding_plan(family: str) -> bool:
    """Returns whether tensor parallelism can shard the family's layers, by its file or by the plan of transformers."""
    try:
        return bool(get_tensor_parallel_plan(build_family_config(family)))
    except UserError:
        return False


def build_family_config(model_type: str, tied: bool = False, **fields: Any) -> PretrainedConfig:
    sizes = {key: _SIZES[key] for key in _COMMON} if model_type in _OWN_SIZES else _SIZES
    given = {**sizes, **ALL[model_type], "tie_word_embeddings": tied, **fields}
    return AutoConfig.for_model(given.pop("model_type", model_type), **given)


def build_family(model_type: str, tied: bool = False, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """The Hugging Face model, fp32, with every vector (norms, biases, buffers) away from its initial ones and zeros."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(build_family_config(model_type, tied, **fields))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("A_log"):
                tensor.uniform_(-3, 0)  # a state that outlasts a document; at 3 it is gone at the next token
            elif tensor.ndim == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight", "feed_forward.router.weight")):
                tensor.normal_(std=0.2)  # a router that is sure of its choice, whatever the last bit
    return model


def save_family(folder: Path, model_type: str, **options: Any) -> Path:
    build_family(model_type, **options).save_pretrained(folder)
    return folder
