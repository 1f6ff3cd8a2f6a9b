"""The models whose speed is measured: of Llama 3.2 and 3, parts of the larger ones, and layers of mixtures: of
Qwen3-30B-A3B, and one of DeepSeek-V3, V3.2 and Qwen3-235B-A22B, also in the forms that weights are published in."""

from __future__ import annotations

from typing import Any

QUANTIZATION_CONFIG = "quantization_config"  # the field of config.json
VOCABULARY = 128_256
_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    },
    "8b": _8B,
    # A stage of four from the middle: its decoder layers, with an embedding and a head too small to count
    "8b stage": {**_8B, "num_hidden_layers": 8, "vocab_size": 512},
    # The same of 70B, of eight
    "70b stage": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 10,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 512,
    },
    # Of 48 layers of Qwen3-30B-A3B
    "30b stage": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 512,
    },
}
_LAYERS: dict[str, dict[str, Any]] = {
    "deepseek layer": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 512,
    },
    "235b layer": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 512,
    },
}
_LAYERS["deepseek 3.2 layer"] = {
    **_LAYERS["deepseek layer"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PUBLISHED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": _INT4}},
    },
}
SHAPES |= _LAYERS
SHAPES |= {
    f"{name} in {form}": {**fields, QUANTIZATION_CONFIG: quantization}
    for name, fields in _LAYERS.items()
    for form, quantization in PUBLISHED.items()
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_TINY_EXPERTS = {"moe_intermediate_size": 32, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
_TINY_LATENT = {
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_TINY_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 32}


def find_shape(name: str, tiny: bool, seq_length: int) -> dict[str, Any]:
    """The fields of a config, a Llama's where they name no `model_type`."""
    fields = SHAPES[name]
    if tiny:
        experts = _TINY_EXPERTS if "num_experts" in fields else _TINY_LATENT if "n_routed_experts" in fields else {}
        fields = {**fields, **_TINY, **experts, **(_TINY_INDEXER if "index_topk" in fields else {})}
    return {**fields, "max_position_embeddings": seq_length, "rope_theta": 500_000.0}
