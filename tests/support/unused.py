"""Small models with tensors that no layer reads: layers that predict further tokens, named as they are published."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.model_folders import Tensors
from support.tiny import VOCAB_SIZE
from support.wrapped import save_wrapped
from transformers import AutoConfig, AutoModelForCausalLM

HIDDEN = 48
# What such a layer has in addition to the parts of a decoder layer.
_NUMBERED = {
    "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "enorm.weight": (HIDDEN,),
    "hnorm.weight": (HIDDEN,),
    "embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
    "shared_head.norm.weight": (HIDDEN,),
    "shared_head.head.weight": (VOCAB_SIZE, HIDDEN),
}
_MTP = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "norm.weight": (HIDDEN,),
    "pre_fc_norm_embedding.weight": (HIDDEN,),
    "pre_fc_norm_hidden.weight": (HIDDEN,),
}
# model_type -> prefix of the layer's parts, prefix of its decoder layer, the other parts, the decoder layer to copy.
_NAMES = {
    "deepseek_v3": ("model.layers.4.", "model.layers.4.", _NUMBERED, "model.layers.3."),
    "glm4_moe": ("model.layers.4.", "model.layers.4.", _NUMBERED, "model.layers.3."),
    "qwen3_next": ("mtp.", "mtp.layers.0.", _MTP, "model.layers.3."),
    "qwen3_5_text": ("mtp.", "mtp.layers.0.", _MTP, "model.layers.3."),
    "mimo_v2_flash": ("model.mtp.", "model.mtp.layers.0.", _MTP, "model.layers.3."),
    "qwen3_5": ("mtp.", "mtp.layers.0.", _MTP, "model.language_model.layers.3."),
    "kimi_k25": (
        "language_model.model.layers.4.",
        "language_model.model.layers.4.",
        _NUMBERED,
        "language_model.model.layers.3.",
    ),
}
_MIMO = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
FAMILIES = tuple(name for name in _NAMES if name not in ("qwen3_5", "kimi_k25"))
WRAPPED = ("qwen3_5", "kimi_k25")
COUNTS = {"qwen3_next": "mtp_num_hidden_layers", "qwen3_5_text": "mtp_num_hidden_layers"}


def save_with_unused(folder: Path, model_type: str) -> Tensors:
    """Saves a small model with such a layer, in bf16. Returns the tensors of that layer."""
    if model_type in WRAPPED:
        save_wrapped(folder, model_type)
    elif model_type == "mimo_v2_flash":
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_MIMO)).save_pretrained(folder)
    else:
        fields = {COUNTS[model_type]: 1} if model_type in COUNTS else {}
        save_family(folder, model_type, **fields)
    return add_unused(folder, model_type)


def add_unused(folder: Path, model_type: str) -> Tensors:
    """Adds such a layer to the only safetensors file of a folder. Returns its tensors."""
    prefix, decoder, parts, ordinary = _NAMES[model_type]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    shapes = {prefix + name: shape for name, shape in parts.items()} | {
        re.sub(f"^{re.escape(ordinary)}", decoder, name): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(ordinary)
    }
    generator = torch.Generator().manual_seed(5)
    unused = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors | unused, file, {"format": "pt"})
    return unused


def load_export(folder: Path) -> Tensors:
    """Returns all tensors of a Hugging Face folder, of any number of shards."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
