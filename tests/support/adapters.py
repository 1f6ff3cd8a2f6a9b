"""peft folders and weights to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from models.adapters.adapter import Adapter
from models.adapters.build import build_adapter
from models.adapters.folder import name_for_peft, to_peft_name
from models.adapters.options import AdapterName, AdapterOptions
from models.adapters.targets import ALL_LINEAR, build_lora_config
from models.architecture.lookup import build_layers
from models.heads.head import Head, Labels
from models.heads.table import describe_head
from models.layers.layer import Layer


def build_lora(layers: Sequence[Layer], **options: Any) -> Adapter:
    """The adapter of `adapter=lora` with these options."""
    chosen = AdapterOptions(name=AdapterName.lora, **options)
    adapter = build_adapter(chosen, layers, seed=3, base_name="model")
    assert adapter is not None
    return adapter


def make_adapter(
    folder: Path,
    model_folder: Path,
    target_modules: str | list[str] = ALL_LINEAR,
    head: Head | None = None,
    **options: object,
) -> PeftModel:
    """A peft folder with random matrices, both of them, so that every one of them has a gradient. target_modules:
    all projections and experts by default. head: in place of the LM head, with one output, which is saved too."""
    torch.manual_seed(3)
    model, config = load_with_head(model_folder, head)
    saved = {} if head is None else {"task_type": head.peft_task}
    if head is not None and head.has_weights:
        saved["modules_to_save"] = ["score"]
    lora = build_lora_config(
        build_layers(config),
        target_modules,
        r=4,
        lora_alpha=6,
        init_lora_weights=False,
        **saved,
        **options,
    )
    adapted = get_peft_model(model, name_for_peft(lora, model.config))
    adapted.save_pretrained(folder)
    return adapted


def load_with_head(folder: Path, head: Head | None) -> tuple[PreTrainedModel, PretrainedConfig]:
    """The model of a folder with this head, whose one output is drawn, in place of the LM head; and the config by which
    the project knows it."""
    if head is None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model, deepcopy(model.config)
    auto = AutoModelForSequenceClassification if head.has_weights else AutoModel
    model = auto.from_pretrained(folder, **({"num_labels": 1} if head.has_weights else {}))
    causal = AutoConfig.from_pretrained(folder)
    return model, describe_head(causal, head, Labels(num_labels=1 if head.has_weights else None))


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
