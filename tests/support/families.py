"""A tiny random model of every family, with every feature of the family switched on, and weights that tell mistakes
apart."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from support.tiny import VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from models.architecture import ARCHITECTURES

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

# model_type -> fields of its config beside the common sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
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
_COMMON = ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
_OWN_SIZES = ("mpt", "gpt2")  # families that name their sizes themselves


def has_sharding_plan(model_type: str) -> bool:
    """Whether the family's file says how tensor parallelism cuts its layers."""
    return hasattr(import_module(ARCHITECTURES[model_type]), "tensor_parallel_plan")


def build_family_config(model_type: str, tied: bool = False, **fields: Any) -> PretrainedConfig:
    sizes = {key: _SIZES[key] for key in _COMMON} if model_type in _OWN_SIZES else _SIZES
    return AutoConfig.for_model(model_type, **{**sizes, **FAMILIES[model_type], "tie_word_embeddings": tied, **fields})


def build_family(model_type: str, tied: bool = False, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """The Hugging Face model, fp32, with every vector (norms, biases, buffers) away from its initial ones and zeros."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(build_family_config(model_type, tied, **fields))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            elif "gate.weight" in name:
                tensor.normal_(std=0.2)  # a router that is sure of its choice, whatever the last bit
    return model


def save_family(folder: Path, model_type: str, **options: Any) -> Path:
    build_family(model_type, **options).save_pretrained(folder)
    return folder
