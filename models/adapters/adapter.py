"""LoRA (2106.09685) through peft: put on the layers of a stage, and merged layer by layer; and QLoRA (2305.14314), the
projections beside the adapters in 4 bits, through bitsandbytes.

peft works on the modules of one layer at a time, so it never sees a whole model; what it would name
"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight" is that prefix, the layer's own, and the name in the
layer (`models/adapters/folder.py`).
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from errors import UserError
from models.adapters.folder import ADAPTER_NAME, TIED_HEAD, to_peft_name
from models.adapters.targets import is_saved, list_projections, list_targets
from models.layers.layer import Layer
from models.parallel.shard import NO_TP, TensorParallel
from models.sharding.tensor_parallel import list_shard_specs, shard_adapter

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


# What peft imports warns, on CPUs with bf16 (bitsandbytes 0.50.2), of a kernel for 4 bits that nobody asked for.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


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

    def attach(self, module: nn.Module, index: int, layer: Layer, parallel: TensorParallel = NO_TP) -> None:
        """Freezes the module of layer `index`, weights loaded, and puts trainable adapters on its targets; cut as
        those are.

        Raises UserError for start weights that do not fit.
        """
        if is_saved(layer, self.config):
            self._fill_saved(module, layer, parallel)
            return
        module.requires_grad_(False)
        if not list_targets(module, layer, self.config):
            return
        is_meta = next(module.parameters()).is_meta
        if self.in_4bit and not is_meta:  # a plan counts on meta, where nothing can be quantized
            quantize_projections(module)
        self._inject_random(module, index, layer)
        tensors = (
            {name: self.tensors.get(to_peft_name(name, layer)) for name in adapter_names(module)}
            if self.tensors
            else None
        )
        if parallel.size > 1:
            for adapted in _list_adapted(module):
                shard_adapter(adapted, parallel)
            if tensors is None and not is_meta:  # drawn whole: so they are the same however they are cut
                whole = _build_hollow(layer)
                self._inject_random(whole, index, layer)
                tensors = {name: whole.get_parameter(name) for name in adapter_names(whole)}
            shard_specs = list_shard_specs(module)
            tensors = tensors and {
                name: shard_specs[name].take(t, parallel) if t is not None and name in shard_specs else t
                for name, t in tensors.items()
            }
        if tensors:
            fill_adapter(module, tensors)

    def _fill_saved(self, module: nn.Module, layer: Layer, parallel: TensorParallel) -> None:
        """Of a module that is trained as it is."""
        if not self.tensors:
            return
        shard_specs = list_shard_specs(module)
        names = [name for name, _ in module.named_parameters()]
        tensors = {name: self.tensors.get(to_peft_name(name, layer)) for name in names}
        fill_parameters(
            module,
            {
                name: shard_specs[name].take(t, parallel) if t is not None and name in shard_specs else t
                for name, t in tensors.items()
            },
            names,
        )

    def _inject_random(self, module: nn.Module, index: int, layer: Layer) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + index)
            inject_adapter(self.config, module, layer)


def _build_hollow(layer: Layer) -> nn.Module:
    """The layer's module on the CPU, each parameter one number seen many times: peft looks at shapes alone."""
    module = layer.build_on_meta()
    for name, parameter in list(module.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        hollow = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        setattr(module.get_submodule(owner), own_name, nn.Parameter(hollow, requires_grad=False))
    return module


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
    """peft's modules around the parts that have adapters; around experts one for each stack, nested."""
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


@torch.no_grad()
def fill_adapter(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Sets adapter parameters by their names in the module. Raises UserError for a missing one or another shape."""
    fill_parameters(module, tensors, adapter_names(module))


@torch.no_grad()
def fill_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor | None], names: Sequence[str]) -> None:
    """Sets these parameters of the module. Raises UserError as `fill_adapter` does."""
    parameters = dict(module.named_parameters())
    for name in names:
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != parameters[name].shape:
            state = (
                "missing" if tensor is None else f"of shape {list(tensor.shape)}, not {list(parameters[name].shape)}"
            )
            raise UserError(f"the adapter's '{name}' is {state}; it was trained with other targets or another rank")
        parameters[name].copy_(tensor)


@torch.no_grad()
def merge_adapter(module: nn.Module) -> dict[str, torch.Tensor]:
    """Adds the adapters of a layer's module to its weights. Returns these, by their names without adapters."""
    for adapted in _list_adapted(module):
        adapted.merge()
    return {
        name.replace(".base_layer", ""): parameter.detach()
        for name, parameter in module.named_parameters()
        if ".base_layer." in name and "lora_" not in name
    }


def check_all_taken(names: Collection[str], config: LoraConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for a tensor, by peft's name, that no layer takes: what it has learned would be lost."""
    taken = {name for layer in layers for name in _list_names(config, layer)} if names else set()
    if not layers[-1].owns_weights:
        taken.add(TIED_HEAD)
    if left := sorted(set(names) - taken):
        raise UserError(
            f"the adapter's '{left[0]}' is on no projection or expert of a decoder layer of this model, nor of a "
            "module in modules_to_save; only those are carried"
        )


def _list_names(config: LoraConfig, layer: Layer) -> list[str]:
    """What a peft folder has for a layer."""
    module = layer.build_on_meta()
    if is_saved(layer, config):
        return [to_peft_name(name, layer) for name, _ in module.named_parameters()]
    if not list_targets(module, layer, config):
        return []
    inject_adapter(config, module, layer)
    return [to_peft_name(name, layer) for name in adapter_names(module)]


def inject_adapter(config: LoraConfig, module: nn.Module, layer: Layer) -> None:
    """Puts adapters with random matrices on the targets of a layer's module; on meta where that is."""
    from peft import inject_adapter_in_model

    from models.experts.lora import show_to_peft, use_grouped_products

    targets = list_targets(module, layer, config)
    exact = copy.deepcopy(config)
    exact.target_modules, exact.target_parameters = list(targets.projections), list(targets.parameters) or None
    exact.modules_to_save, exact.ensure_weight_tying = None, False  # those are other layers
    weight = next(module.parameters())
    with warnings.catch_warnings(), torch.device("meta" if weight.is_meta else "cpu"), show_to_peft(module):
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # of patterns of ranks that are another layer's, or a parameter's
        inject_adapter_in_model(exact, module, adapter_name=ADAPTER_NAME)
    use_grouped_products(module)
