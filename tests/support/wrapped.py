"""Tiny random multimodal models: a text model with a tower for images or sound, and a projector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.families import build_family_config
from support.tiny import VOCAB_SIZE
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig, PreTrainedModel

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 8,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_TEXT = {
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
    "initializer_range": 0.15,
}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
_MUSE = {
    "head_dim": 16,
    "sliding_window": 8,
    "final_logit_softcapping": 2.0,
    "output_multiplier": 0.3,
    # Of normed queries: with the 5.5 of Muse Spark attention is so sharp that the order of sums shows within five steps
    "qk_scale_factor": 1.5,
}
_MUSE_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_PARTS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_MROPE = {**_PARTS, "mrope_interleaved": True}
_HALF_MROPE = {**_PARTS, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}


def _family(model_type: str, **fields: Any) -> dict[str, Any]:
    return build_family_config(model_type, **fields).to_dict()


# model_type of the whole -> its fields.
WRAPPED: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": _family("mistral"),
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": _family("qwen2"),
        "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": _family("llama"),
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": _MROPE},
        "vision_config": _QWEN_VISION,
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 48,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        "tie_word_embeddings": True,
    },
    "qwen2_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        },
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 8},
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 16,
            "rope_parameters": _MROPE,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        "vision_config": _QWEN_VISION,
        "tie_word_embeddings": False,
    },
    "kimi_k25": {
        "text_config": _family("deepseek_v3"),
        "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": _KINDS,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "model_type": "llama4_text",
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "moe_layers": [],  # its routers hand out two things
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 1, 0],
        },
        "vision_config": {
            **_VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {name: value for name, value in _QWEN_VISION.items() if name != "deepstack_visual_indexes"},
        "tie_word_embeddings": False,
    },
    "glm4v": {
        "text_config": {**_TEXT, "model_type": "glm4v_text", "rope_parameters": _HALF_MROPE},
        "vision_config": _GLM_VISION,
        "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": {
            **_TEXT,
            "model_type": "glm4v_moe_text",
            "head_dim": 16,
            "rope_parameters": {**_HALF_MROPE, "mrope_section": [1, 2, 1]},
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
        },
        "vision_config": _GLM_VISION,
        "tie_word_embeddings": False,
    },
    "glm_ocr": {
        "text_config": {**_TEXT, "model_type": "glm_ocr_text", "head_dim": 16, "rope_parameters": _PARTS},
        "vision_config": _GLM_VISION,
        "tie_word_embeddings": True,
    },
    "muse_glimmer": {
        "text_config": {**_TEXT, **_MUSE, "model_type": "muse_glimmer_text"},
        "vision_config": _MUSE_VISION,
        "out_hidden_size": 48,
        "projector_hidden_size": 40,
        "tie_word_embeddings": False,
    },
    "muse_spark": {
        "text_config": {
            **_TEXT,
            **_MUSE,
            "model_type": "muse_spark_text",
            "moe_intermediate_size": 24,
            "moe_hidden_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        "vision_config": _MUSE_VISION,
        "audio_config": {
            "patch_sizes": [4, 2],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 48,
        },
        "out_hidden_size": 48,
        "projector_hidden_size": 40,
        "tie_word_embeddings": False,
    },
    "step3p7": {
        "text_config": {
            **_TEXT,
            "model_type": "step3p5",
            "head_dim": 16,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "sliding_window": 8,
            "num_sliding_attention_heads": 6,
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_router_scaling_factor": 3.0,
            "rope_theta": [100000.0, 10000.0, 10000.0, 10000.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
            "swiglu_limits": [0.0, 0.0, 0.0, 0.5],
            "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.7],
        },
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
            "mlp_ratio": 1.5,
            "max_position_embeddings": 4,
        },
        "tie_word_embeddings": False,
    },
    "idefics3": {
        "text_config": _family("llama"),
        "vision_config": _VISION,
        "tie_word_embeddings": False,
    },
    "qwen2_audio": {
        "text_config": _family("qwen2"),
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
        "tie_word_embeddings": False,
    },
}


def build_wrapped(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Returns the Hugging Face model: text in fp32, the other parts in bf16; no vector has its initial values."""
    config = AutoConfig.for_model(model_type, **{**WRAPPED[model_type], **fields})
    torch.manual_seed(seed)
    model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor += 0.1 * torch.randn_like(tensor)
    return model


def save_wrapped(folder: Path, model_type: str, **options: Any) -> PreTrainedModel:
    """Saves the model as `transformers` does, with the parts other than text in bf16. Returns it in fp32."""
    model = build_wrapped(model_type, **options)
    text = {id(tensor) for part in (model.get_decoder(), model.get_output_embeddings()) for tensor in part.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in text]
    assert others
    for parameter in others:
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    if (
        model_type == "kimi_k25"
    ):  # the text's layers have their own name on the hub: what saving makes of them is undone
        file = folder / "model.safetensors"
        tensors = load_file(file)
        text = "language_model.model."
        save_file(
            {name.replace(f"{text}blocks", f"{text}layers"): t for name, t in tensors.items()}, file, {"format": "pt"}
        )
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "none of ours"}\n')
    return model.float()
