"""A standard peft folder: reading its config and tensors, and the names that peft gives them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.adapters.options import starts_from_base
from models.layers.layer import Layer
from models.storage.tensor_files import load_json, open_safetensors

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

ReadAdapter = Callable[
    [int, Layer, list[str]], dict[str, torch.Tensor]
]  # index, layer, names in its module -> the tensors of its adapter

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_FINGERPRINT = "base_model_fingerprint"  # in the metadata of the file of weights
DEFAULT_RANK = 8  # peft's own, where adapter_config.json has no "r"
ADAPTER_NAME = "default"  # peft's own for an adapter that has none
_PREFIX = "base_model.model."
TIED_HEAD = _PREFIX + "lm_head.weight"  # of a head tied to an embedding in `modules_to_save`, in addition to it
# Fields of peft's config that are read here, and those that mean nothing once an adapter has its weights. Every other
# one singles out layers, trains more than an adapter or computes otherwise
_READ = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "ensure_weight_tying",
    "init_lora_weights",
    "base_model_name_or_path",
    "revision",
    "peft_type",
    "task_type",
    "inference_mode",
)
_WITHOUT_EFFECT = (
    "auto_mapping",
    "peft_version",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
)


def to_peft_name(name: str, layer: Layer) -> str:
    """Returns the name in a peft folder of the parameter `name` of the layer's module."""
    # peft's files have DoRA's vector without ".weight"
    ending = f".{ADAPTER_NAME}.weight" if "lora_magnitude_vector" in name else f".{ADAPTER_NAME}"
    return _PREFIX + layer.hf_prefix + name.replace(ending, "")


def load_lora_config(path: Path) -> LoraConfig:
    """Load the adapter's config from the folder `path`. Raises UserError when peft cannot read it, or it is not LoRA on
    all layers alike."""
    from peft import LoraConfig

    fields = load_json(path / ADAPTER_CONFIG)
    if fields.get("peft_type") != "LORA":
        raise UserError(
            f"{path / ADAPTER_CONFIG} describes {fields.get('peft_type')}; only LoRA adapters are supported"
        )
    if unsupported := _list_unsupported(fields):
        raise UserError(
            f"{path / ADAPTER_CONFIG} has {unsupported[0]}={fields[unsupported[0]]}, which is not supported; "
            "merge the adapter with peft first"
        )
    check_fields(path / ADAPTER_CONFIG, fields)
    try:
        lora = LoraConfig.from_pretrained(str(path))
    except Exception as error:  # peft validates with types of its own
        raise UserError(
            f"{path / ADAPTER_CONFIG} is not a valid config of this peft: {' '.join(str(error).split())}"
        ) from None
    lora.peft_version = fields.get("peft_version")  # where a folder has none, peft fills in the one that is installed
    return lora


def _list_unsupported(fields: Mapping[str, Any]) -> list[str]:
    """Returns the fields of adapter_config.json that differ from peft's defaults and are not read here."""
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    others = [key for key in fields if key in defaults and key not in (*_READ, *_WITHOUT_EFFECT)]
    return [key for key in others if fields[key] not in (defaults[key], None, {}, [], "none")]


def has_own_head(tensors: Mapping[str, torch.Tensor], layers: Sequence[Layer]) -> bool:
    """Returns whether the tensors of a peft folder hold a trained head that differs from the embedding, for a model
    whose head is its embedding: peft trains such a head apart from it."""
    head, embedding = tensors.get(TIED_HEAD), tensors.get(to_peft_name("weight", layers[0]))
    if head is None or layers[-1].owns_weights:
        return False
    return embedding is None or not torch.equal(head, embedding)


def check_fields(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError for a value that no LoRA adapter can have, and that peft does not check. fields: of
    adapter_config.json, which is `file`."""
    _check_types(file, fields)
    _check_numbers(file, fields)


def _check_types(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError for a field of a type that peft does not check, and takes for another value."""
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        value = fields.get(name)
        is_missing = value is None and (name != "target_modules" or fields.get("target_parameters"))
        if not is_missing and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise UserError(f"{file} has {name}={value!r}; write a list of names there")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(fields.get(name) or {}, Mapping):
            raise UserError(f"{file} has {name}={fields[name]!r}; it has to be a mapping of names to numbers")
    for name in ("use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying"):
        if not isinstance(fields.get(name) or False, bool):
            raise UserError(f"{file} has {name}={fields[name]!r}; it has to be true or false")
    if not isinstance(version := fields.get("peft_version"), str | None):
        raise UserError(f"{file} has peft_version={version!r}; write it in quotes, or null")


def _check_numbers(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError for a number that peft does not check before it builds or scales matrices with it."""
    ranks = {
        "r": fields.get("r", DEFAULT_RANK),
        **{f"rank_pattern.{key}": r for key, r in (fields.get("rank_pattern") or {}).items()},
    }
    alphas = {"lora_alpha": fields.get("lora_alpha", 8)}
    alphas |= {f"alpha_pattern.{key}": alpha for key, alpha in (fields.get("alpha_pattern") or {}).items()}
    wrong = {name: "a whole number from 1" for name, r in ranks.items() if type(r) is not int or r < 1}
    wrong |= {
        name: "a number above 0"
        for name, alpha in alphas.items()
        if type(alpha) not in (int, float) or not 0 < alpha < math.inf
    }
    dropout = fields.get("lora_dropout", 0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        wrong["lora_dropout"] = "a number from 0 to below 1"
    for name, wanted in wrong.items():
        value = {**ranks, **alphas, "lora_dropout": dropout}[name]
        raise UserError(f"{file} has {name}={value!r}; it has to be {wanted}")


def read_tensors(tensors: Mapping[str, torch.Tensor]) -> ReadAdapter:
    """Returns a function that picks a layer's tensors from those of a peft folder, by their names in its module."""
    return lambda index, layer, names: {
        name: tensors[to_peft_name(name, layer)] for name in names if to_peft_name(name, layer) in tensors
    }


def load_adapter_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a peft folder, by peft's names. Raises UserError when the file is missing or damaged, and for
    an adapter of a base model that peft changes first."""
    file = path / ADAPTER_WEIGHTS
    if not file.is_file():
        raise UserError(f"{path} holds {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}; the adapter is incomplete")
    init = load_json(path / ADAPTER_CONFIG).get("init_lora_weights")
    if starts_from_base(init):
        raise UserError(
            f"{path / ADAPTER_CONFIG}: init_lora_weights={init}: the adapter belongs to a base model less what it has "
            "begun as, which peft computes again wherever it loads it; save it with peft's "
            "path_initial_model_for_weight_conversion, or give true there if base_model_name_or_path is what is left"
        )
    opened = open_safetensors(file)
    return {name: opened.get_tensor(name) for name in opened.keys()}


def read_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the base model in a peft folder that a run has exported; None in another folder."""
    if not (path / ADAPTER_WEIGHTS).is_file():
        return None
    return (open_safetensors(path / ADAPTER_WEIGHTS).metadata() or {}).get(BASE_FINGERPRINT)


def name_for_peft(lora: LoraConfig, config: PretrainedConfig) -> LoraConfig:
    """Returns the config in the form that `PeftModel.from_pretrained` accepts for this model.

    For many mixtures of experts peft (0.21.2, utils/transformers_weight_conversion.py) takes `gate_proj`, `up_proj` and
    the like in `target_modules` for the experts' matrices of transformers 4, and puts adapters of another rank on the
    stacked experts instead. So the modules that these names match, in dense layers and shared experts, are named by
    their weights in `target_parameters`. Those allow no dropout, which matters in training alone.
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
    except ValueError:  # the name is one part of a fused matrix
        return True
    return target not in (probe.target_modules or ())


def fold_weights(lora: LoraConfig) -> tuple[set[str], set[str]]:
    """Returns the config's targets as (modules, parameters), as they were before `name_for_peft`: a module that is
    named by its weight counts as a module."""
    parameters = set(lora.target_parameters or ())
    weights = {name for name in parameters if name.endswith(".weight")}
    return {*(lora.target_modules or ()), *(name.removesuffix(".weight") for name in weights)}, parameters - weights
