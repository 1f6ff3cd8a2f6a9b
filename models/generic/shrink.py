"""Small models with all features of a config, which a proof can run in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from models.experts.sizes import NUM_CHOSEN, NUM_EXPERTS

# A small model keeps the config's other fields. Those that it does not have are omitted.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "q_lora_rank": 24,
}
_NUM_LAYERS = 4


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A small config with the features of `config`: a layer of each kind, and the same fields but for sizes."""
    kinds = getattr(config, "layer_types", None) or []
    chosen = sorted({kinds.index(kind) for kind in kinds} | set(range(min(_NUM_LAYERS, config.num_hidden_layers))))
    fields = config.to_dict()
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            fields[name] = [value[index] for index in chosen]
    sizes = {name: value for name, value in _SMALL.items() if fields.get(name) is not None} | _shrink_experts(fields)
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        sizes.pop("num_key_value_heads", None)
        fields["num_key_value_heads"] = sizes.get("num_attention_heads")
    shrunk = {**fields, **sizes, "num_hidden_layers": len(chosen)}
    for rope in (fields.get("rope_parameters"), fields.get("rope_scaling")):
        if rope and rope.get("mrope_section"):
            rope["mrope_section"] = _shrink_sections(
                rope["mrope_section"], _get_head_dim(shrunk) / _get_head_dim(config.to_dict())
            )
    return type(config)(**shrunk)


def _get_head_dim(fields: Mapping[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _shrink_sections(sections: Sequence[int], scale: float) -> list[int]:
    """The parts of a rotary embedding that Qwen-VL's three kinds of positions take, in their proportions."""
    total = round(sum(sections) * scale)
    rest = [max(1, int(section * scale)) for section in sections[1:]]
    return [total - sum(rest), *rest]


def _shrink_experts(fields: Mapping[str, Any]) -> dict[str, int]:
    """Few experts, in as many groups as before."""
    num_experts = max(8, 4 * (fields.get("n_group") or 1))
    most = {**dict.fromkeys(NUM_EXPERTS, num_experts), **dict.fromkeys(NUM_CHOSEN, 2)}
    return {name: min(fields[name], limit) for name, limit in most.items() if fields.get(name)}


def build_small(config: PretrainedConfig) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model of a small config with random weights, the same at every call, and input_ids [2, 24]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model, torch.randint(3, config.vocab_size, (2, 24))
