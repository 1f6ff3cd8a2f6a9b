"""peft folders and weights to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from models.adapters.adapter import Adapter
from models.adapters.build import build_adapter
from models.adapters.folder import name_for_peft, to_peft_name
from models.adapters.options import AdapterName, AdapterOptions
from models.adapters.targets import ALL_LINEAR, build_lora_config
from models.architecture.lookup import build_layers
from models.layers.layer import Layer


def build_lora(layers: Sequence[Layer], **options: Any) -> Adapter:
    """The adapter of `adapter=lora` with these options."""
    chosen = AdapterOptions(name=AdapterName.lora, **options)
    adapter = build_adapter(chosen, layers, seed=3, base_name="model")
    assert adapter is not None
    return adapter


def make_adapter(
    folder: Path, model_folder: Path, target_modules: str | list[str] = ALL_LINEAR, **options: object
) -> PeftModel:
    """A peft folder with random matrices, both of them, so that every one of them has a gradient. target_modules:
    all projections and experts by default."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    lora = build_lora_config(
        build_layers(deepcopy(model.config)), target_modules, r=4, lora_alpha=6, init_lora_weights=False, **options
    )
    adapted = get_peft_model(model, name_for_peft(lora, model.config))
    adapted.save_pretrained(folder)
    return adapted


def to_peft_weights(
    result: dict[str, Any], oracle: dict[str, Any], config: PretrainedConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adapters' weights of the stages and of the oracle, by the names in a peft folder."""
    trained = {
        to_peft_name(name.removeprefix(layer.hf_prefix), layer): tensor
        for name, tensor in result["weights"].items()
        for layer in build_layers(config)
        if "lora_" in name and name.startswith(layer.hf_prefix)
    }
    expected = {
        name.replace("_vector.default.weight", "_vector").replace(".default", ""): t
        for name, t in oracle["weights"].items()
        if "lora_" in name
    }
    return trained, expected
