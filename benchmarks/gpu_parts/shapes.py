"""The models whose speed is measured: of Llama 3.2 and 3, parts of the larger ones, and of Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

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
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_TINY_EXPERTS = {"moe_intermediate_size": 32, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}


def find_shape(name: str, tiny: bool, seq_length: int) -> dict[str, Any]:
    """The fields of a config, a Llama's where they name no `model_type`."""
    fields = SHAPES[name]
    if tiny:
        fields = {**fields, **_TINY, **(_TINY_EXPERTS if "num_experts" in fields else {})}
    return {**fields, "max_position_embeddings": seq_length, "rope_theta": 500_000.0}
