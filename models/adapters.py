"""LoRA (2106.09685) through peft: put on the layers of a stage, saved as a standard peft folder, merged layer by layer;
and QLoRA (2305.14314), the projections beside the adapters in 4 bits, through bitsandbytes.

peft works on the modules of one layer at a time, so it never sees a whole model; what it would name
"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight" is that prefix, the layer's own, and the name in the
layer.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from errors import UserError
from models.layer import Layer
from models.parallel.shard import ALONE, TensorParallel
from models.parallel.tensor_parallel import list_shard_specs, shard_adapter
from models.weights.tensor_files import load_json, open_safetensors

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


# What peft imports reports, on machines without a GPU, a kernel that nobody asked for: a line for the log of the rank,
# where there is one.
logging.getLogger("bitsandbytes").addHandler(logging.NullHandler())

ReadAdapter = Callable[
    [int, Layer, list[str]], dict[str, torch.Tensor]
]  # number, layer, names in its module -> its adapter's tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
_NAME = "default"  # peft's own for an adapter that has none
_PREFIX = "base_model.model."
# Fields of peft's config that single out layers or train more than an adapter: a layer by itself cannot follow them
_NOT_CARRIED = ("bias", "layers_to_transform", "exclude_modules")


def build_lora_config(layers: Sequence[Layer], target_modules: str | list[str], **options: Any) -> LoraConfig:
    """peft's config for the layers' model.

    target_modules: names of projections, or "all-linear" for every one in the decoder layers (not the head).
    options: further fields of `peft.LoraConfig`.
    Raises UserError for a name that no projection bears.
    """
    from peft import LoraConfig

    known: dict[str, type[nn.Module]] = {}
    for layer in layers:
        known |= {name: type(module) for name, module in list_projections(layer.build_on_meta()).items()}
    short = sorted({name.rsplit(".", 1)[-1] for name in known})
    targets = (
        short
        if target_modules == ALL_LINEAR
        else [target_modules]
        if isinstance(target_modules, str)
        else list(target_modules)
    )
    for target in targets:
        if not any(_is_named(name, target) for name in known):
            raise UserError(
                f"adapter.target_modules: no projection of the model is named '{target}'; "
                f"there are {', '.join(short)}, or {ALL_LINEAR} for all"
            )
    transposed = any(issubclass(module_class, Conv1D) for module_class in known.values())
    return LoraConfig(target_modules=targets, fan_in_fan_out=transposed, task_type="CAUSAL_LM", **options)


def list_projections(module: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """Name -> what an adapter can be put on: matrices inside a decoder layer."""
    return {name: child for name, child in module.named_modules() if name and isinstance(child, (nn.Linear, Conv1D))}


@dataclass(frozen=True)
class Adapter:
    """What is put on the layers.

    tensors: weights to start from, named as in a peft folder; none: peft's random ones, equal at every layout for one
    seed.
    in_4bit: whether the projections of the layers that get adapters are kept in 4 bits (nf4).
    """

    config: LoraConfig
    seed: int = 0
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    in_4bit: bool = False

    def attach(self, module: nn.Module, index: int, layer: Layer, parallel: TensorParallel = ALONE) -> None:
        """Freezes the module of layer `index`, weights loaded, and puts trainable adapters on its target modules; cut
        as those are.

        Raises UserError for start weights that do not fit.
        """
        module.requires_grad_(False)
        if not list_targets(module, self.config):
            return
        if (
            self.in_4bit and not next(module.parameters()).is_meta
        ):  # a plan counts on meta, where nothing can be quantized
            quantize_projections(module)
        self._inject_random(module, index)
        is_meta = next(module.parameters()).is_meta
        tensors = (
            {name: self.tensors.get(to_peft_name(name, layer)) for name in adapter_names(module)}
            if self.tensors
            else None
        )
        if parallel.size > 1:
            for projection in _list_adapted(module):
                shard_adapter(projection, parallel)
            if tensors is None and not is_meta:  # drawn whole: so they are the same however they are cut
                whole = layer.build_on_meta().to_empty(device="cpu")  # pages that nobody touches are no memory
                self._inject_random(whole, index)
                tensors = {name: whole.get_parameter(name) for name in adapter_names(whole)}
            shard_specs = list_shard_specs(module)
            tensors = tensors and {
                name: shard_specs[name].take(t, parallel) if t is not None and name in shard_specs else t
                for name, t in tensors.items()
            }
        if tensors:
            fill_adapter(module, tensors)

    def _inject_random(self, module: nn.Module, index: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + index)
            inject_adapter(self.config, module)


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """The layers compute as if there were no adapter on them."""
    adapted = _list_adapted(module)
    for child in adapted:
        child.enable_adapters(False)
    try:
        yield
    finally:
        for child in adapted:
            child.enable_adapters(True)


def _list_adapted(module: nn.Module) -> list[Any]:
    """peft's modules around the projections that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [child for child in module.modules() if isinstance(child, BaseTunerLayer)]


def quantize_projections(module: nn.Module) -> None:
    """Replaces a layer's projections, weights loaded, by ones in nf4 with quantized constants, which compute in the old
    dtype.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, linear in list_projections(module).items():
        weight = linear.weight
        quantized = Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        packed = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=quantized)
        quantized.weight = packed.to(weight.device)  # type: ignore[misc]
        quantized.bias = linear.bias
        module.set_submodule(name, quantized)
    module.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft asks for it before it puts an adapter on such a projection


def adapter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters() if "lora_" in name]


def to_peft_name(name: str, layer: Layer) -> str:
    """The name in a peft folder of the adapter parameter `name` of the layer's module."""
    ending = f".{_NAME}.weight" if "lora_magnitude_vector" in name else f".{_NAME}"  # DoRA's vector goes without
    return _PREFIX + layer.hf_prefix + name.replace(ending, "")


@torch.no_grad()
def fill_adapter(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Sets adapter parameters by their names in the module. Raises UserError for a missing one or another shape."""
    parameters = dict(module.named_parameters())
    for name in adapter_names(module):
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != parameters[name].shape:
            state = (
                "missing" if tensor is None else f"of shape {list(tensor.shape)}, not {list(parameters[name].shape)}"
            )
            raise UserError(f"the adapter's '{name}' is {state}; it was trained with other targets or another rank")
        parameters[name].copy_(tensor)


def load_lora_config(path: Path) -> LoraConfig:
    """The adapter's config in the folder `path`. Raises UserError when peft cannot read it, or it is not a LoRA."""
    from peft import LoraConfig

    fields = load_json(path / ADAPTER_CONFIG)
    if fields.get("peft_type") != "LORA" or fields.get("modules_to_save"):
        what = fields.get("peft_type") if fields.get("peft_type") != "LORA" else "a LoRA with modules_to_save"
        raise UserError(f"{path / ADAPTER_CONFIG} describes {what}; only plain LoRA adapters are carried")
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
    if not isinstance(fields.get("target_modules"), list):
        raise UserError(
            f"{path / ADAPTER_CONFIG} has target_modules={fields.get('target_modules')!r}; write a list of names there"
        )
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


def check_all_taken(names: Collection[str], config: LoraConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for a tensor, by peft's name, that no layer takes: what it has learned would be lost."""
    taken = {name for layer in layers for name in _list_names(config, layer)} if names else set()
    if left := sorted(set(names) - taken):
        raise UserError(
            f"the adapter's '{left[0]}' is on no projection of a decoder layer of this model; only those are carried"
        )


def _list_names(config: LoraConfig, layer: Layer) -> list[str]:
    """What a peft folder has for a layer."""
    module = layer.build_on_meta()
    if not list_targets(module, config):
        return []
    inject_adapter(config, module)
    return [to_peft_name(name, layer) for name in adapter_names(module)]


def list_targets(module: nn.Module, config: LoraConfig) -> list[str]:
    """The projections that get an adapter."""
    return [
        name
        for name in list_projections(module)
        if any(_is_named(name, target) for target in config.target_modules or ())
    ]


def inject_adapter(config: LoraConfig, module: nn.Module) -> None:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(copy.deepcopy(config), module, adapter_name=_NAME)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
