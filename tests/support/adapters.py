"""peft folders and weights to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from models.adapters import to_peft_name
from models.architecture import build_layers


def make_adapter(
    folder: Path, model_folder: Path, target_modules: list[str] | None = None, **options: object
) -> PeftModel:
    """A peft folder with random matrices, both of them, so that every one of them has a gradient. target_modules:
    all projections by default."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    targets = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not model.get_output_embeddings()
    }
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=target_modules or sorted(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        fan_in_fan_out=model.config.model_type == "gpt2",
        **options,
    )
    adapted = get_peft_model(model, config)
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
