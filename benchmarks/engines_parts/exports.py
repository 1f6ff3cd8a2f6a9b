"""Small mixtures with a trained adapter: the folder that a run exports, and the tensors that its layers multiply
with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from models.adapters.adapter import Adapter
from models.adapters.build import build_adapter
from models.adapters.folder import to_peft_name
from models.adapters.options import AdapterName, AdapterOptions
from models.adapters.peft_export import export_adapter, save_adapter_config
from models.architecture.lookup import build_layers
from models.experts.lora import GroupedLora
from models.layers.layer import Layer
from models.weights.sources import open_weights

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6},
    "mixtral": {"num_local_experts": 6},
    "gpt_oss": {"num_local_experts": 6},
    "deepseek_v3": {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}


@dataclass(frozen=True)
class Trained:
    """folder: the export. factors: of each stack of experts, by the prefix of its layer and its name, A [E, r, in] and
    B [E, r, out], multiplied by the scale, as the layer's grouped products take them."""

    folder: Path
    config: PretrainedConfig
    factors: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


def export_trained(folder: Path, model_type: str, **options: Any) -> Trained:
    """Put an adapter on a small model of this type, let every matrix of it differ from its start, and export it as a
    run does. options: of the config group `adapter`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **_OWN[model_type]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    source = open_weights(str(folder / "base"))
    layers = build_layers(source.config)
    chosen = AdapterOptions(**{"name": AdapterName.lora, "r": 4, "lora_alpha": 6, **options})
    adapter = build_adapter(chosen, layers, seed=1, base_name=str(folder / "base"))
    assert adapter is not None
    tensors: dict[str, torch.Tensor] = {}
    factors = {}
    for index, layer in enumerate(layers):
        module = _attach(adapter, index, layer, source)
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
                tensors[to_peft_name(name, layer)] = parameter.detach()
        for wrapper in module.modules():
            if isinstance(wrapper, GroupedLora):
                number = int(layer.hf_prefix.split(".")[2])
                factors[number, wrapper.parameter_name] = tuple(each.detach() for each in wrapper.list_factors())
    (folder / "checkpoints").mkdir()
    save_adapter_config(adapter, folder / "checkpoints", source.config)
    export_adapter(folder / "checkpoints", tensors, layers, folder / "hf")
    return Trained(folder / "hf", source.config, factors)  # type: ignore[arg-type]


def _attach(adapter: Adapter, index: int, layer: Layer, source: Any) -> torch.nn.Module:
    module = layer.build_on_meta()
    if layer.owns_weights:
        module.load_state_dict(source.read_layer(index, layer), assign=True)
    adapter.attach(module, index, layer)
    return module
