"""A standard peft folder: its config and tensors, in and out."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.layers.layer import Layer
from models.storage.tensor_files import load_json, open_safetensors

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

ReadAdapter = Callable[
    [int, Layer, list[str]], dict[str, torch.Tensor]
]  # number, layer, names in its module -> its adapter's tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_NAME = "default"  # peft's own for an adapter that has none
_PREFIX = "base_model.model."
TIED_HEAD = _PREFIX + "lm_head.weight"  # of a model whose head is its embedding: beside that in `modules_to_save`
# Fields of peft's config that single out layers or train more than an adapter: a layer by itself cannot follow them
_NOT_CARRIED = ("bias", "layers_to_transform", "exclude_modules", "trainable_token_indices")


def to_peft_name(name: str, layer: Layer) -> str:
    """The name in a peft folder of the adapter parameter `name` of the layer's module."""
    ending = (
        f".{ADAPTER_NAME}.weight" if "lora_magnitude_vector" in name else f".{ADAPTER_NAME}"
    )  # DoRA's vector goes without
    return _PREFIX + layer.hf_prefix + name.replace(ending, "")


def load_lora_config(path: Path) -> LoraConfig:
    """The adapter's config in the folder `path`. Raises UserError when peft cannot read it, or it is not a LoRA."""
    from peft import LoraConfig

    fields = load_json(path / ADAPTER_CONFIG)
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{path / ADAPTER_CONFIG} describes {fields.get('peft_type')}; only LoRA adapters are carried")
    if strange := [key for key in _NOT_CARRIED if fields.get(key) not in (None, {}, [], "none")]:
        raise UserError(
            f"{path / ADAPTER_CONFIG} has {strange[0]}={fields[strange[0]]}; "
            "adapters of all layers alike are carried, without it"
        )
    patterns = [key for name in ("alpha_pattern", "rank_pattern") for key in fields.get(name) or {}]
    if single := [key for key in patterns if re.search(r"\d", key)]:
        raise UserError(
            f"{path / ADAPTER_CONFIG} has a pattern for '{single[0]}'; "
            "adapters of all layers alike are carried, without it"
        )
    modules = fields.get("target_modules")
    if not isinstance(modules, list) and not (modules is None and fields.get("target_parameters")):
        raise UserError(f"{path / ADAPTER_CONFIG} has target_modules={modules!r}; write a list of names there")
    try:
        return LoraConfig.from_pretrained(str(path))
    except Exception as error:  # peft validates with types of its own
        raise UserError(
            f"{path / ADAPTER_CONFIG} is not a valid config of this peft: {' '.join(str(error).split())}"
        ) from None


def read_tensors(tensors: Mapping[str, torch.Tensor]) -> ReadAdapter:
    """How a peft folder's tensors are read, by their names in a layer's module."""
    return lambda index, layer, names: {
        name: tensors[to_peft_name(name, layer)] for name in names if to_peft_name(name, layer) in tensors
    }


def load_adapter_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a peft folder, by peft's names. They are small. Raises UserError when they are not there or
    damaged.
    """
    file = path / ADAPTER_WEIGHTS
    if not file.is_file():
        raise UserError(f"{path} holds {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}; the adapter is incomplete")
    opened = open_safetensors(file)
    return {name: opened.get_tensor(name) for name in opened.keys()}


def name_for_peft(lora: LoraConfig, config: PretrainedConfig) -> LoraConfig:
    """The config as `PeftModel.from_pretrained` takes it for this model.

    Of many mixtures peft (0.21.2, utils/transformers_weight_conversion.py) takes `gate_proj`, `up_proj` and the like in
    `target_modules` for the experts' matrices of transformers 4, and puts adapters on the stacked ones instead, of
    another rank. What those names match, dense layers and shared experts, it finds as `target_parameters`: by weight.
    For those it wants no dropout, which is for training.
    """
    named = copy.deepcopy(lora)
    renamed = {target for target in lora.target_modules or () if _is_renamed(target, config)}
    named.target_modules = sorted(set(lora.target_modules or ()) - renamed)
    named.target_parameters = [*(lora.target_parameters or ()), *sorted(f"{name}.weight" for name in renamed)] or None
    if named.target_parameters:
        named.lora_dropout = 0.0
    return named


def _is_renamed(target: str, config: PretrainedConfig) -> bool:
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe, model = LoraConfig(target_modules=[target]), nn.Module()
    model.config = config  # type: ignore[assignment]
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # a part alone of what is fused
        return True
    return target not in (probe.target_modules or ())


def fold_weights(lora: LoraConfig) -> tuple[set[str], set[str]]:
    """What the config targets as (modules, parameters), a module's weight as the module: as `name_for_peft` got it."""
    parameters = set(lora.target_parameters or ())
    weights = {name for name in parameters if name.endswith(".weight")}
    return {*(lora.target_modules or ()), *(name.removesuffix(".weight") for name in weights)}, parameters - weights
