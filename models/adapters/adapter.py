"""LoRA (2106.09685) through peft, attached to the layers of a stage and merged layer by layer; and QLoRA (2305.14314),
with the projections and the experts of those layers in 4 bits.

peft works on the module of one layer at a time and never sees a whole model. What it would name
"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight" is that prefix, the layer's own prefix, and the name in
the layer's module (`models/adapters/folder.py`).
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from errors import UserError
from models.adapters.base_inits import describe_starts, restore_starts, start_from_base
from models.adapters.folder import ADAPTER_NAME, TIED_HEAD, to_peft_name
from models.adapters.options import starts_from_base
from models.adapters.quantized import hold, list_held, mark_quantized, quantize
from models.adapters.targets import AdapterTargets, is_named, is_saved, list_targets
from models.layers.frozen import FrozenStack
from models.layers.layer import Layer
from models.parallel.shard import NO_EP, NO_TP, ExpertParallel, TensorParallel
from models.sharding.expert_parallel import divide_adapter
from models.sharding.shards import read_shards
from models.sharding.tensor_parallel import shard_adapter

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

# On CPUs with bf16, bitsandbytes (0.50.2), which peft imports, warns about a 4-bit kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter for the layers of a model.

    tensors: initial weights, named as in a peft folder; without them peft's random ones, which depend on the seed and
    not on the layout. in_4bit: whether the projections and the stacks of experts of the layers that get adapters are
    quantized to 4 bits (nf4). kept: the form of their stacks of experts in the files, in which they stay, and their
    projections where those have it; None for a run that dequantizes them. unkept: names of modules that do not have it,
    or the ends of their names.
    """

    config: LoraConfig
    seed: int = 0
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    in_4bit: bool = False
    kept: str | None = None
    unkept: tuple[str, ...] = ()

    @property
    def form(self) -> str | None:
        """The form of the frozen weights, a name in `FORMS` of `models/layers/frozen.py`."""
        return "nf4" if self.in_4bit else self.kept

    def attach(
        self,
        module: nn.Module,
        index: int,
        layer: Layer,
        parallel: TensorParallel = NO_TP,
        expert_parallel: ExpertParallel = NO_EP,
        kept: Mapping[str, FrozenStack] | None = None,
    ) -> None:
        """Freeze the module of layer `index`, whose weights are loaded, and put trainable adapters on its targets,
        sharded as those are. A module in `modules_to_save` stays trainable and gets no adapter. Weights that
        `list_frozen` names may lie in the host's memory; they are quantized on the device of the other weights.
        kept: weights that stay as their files hold them, by name; in their places are parameters without memory.

        Raises UserError for initial weights that do not fit.
        """
        if is_saved(layer, self.config):
            self._fill_saved(module, layer, parallel)
            return
        module.requires_grad_(False)
        if not list_targets(module, layer, self.config):
            return
        is_meta = next(module.parameters()).is_meta
        held = kept or {}
        if is_meta and self.form is not None:
            mark_quantized(module, self.list_frozen(module, layer), self.form)
        elif self.in_4bit:
            held = quantize(module, self.list_frozen(module, layer))
        replacements = hold(module, held)
        self._inject_random(module, index, layer)
        for each in replacements:
            each.replace()
        tensors = (
            {name: self.tensors.get(to_peft_name(name, layer)) for name in adapter_names(module)}
            if self.tensors
            else None
        )
        if parallel.size > 1 or expert_parallel.size > 1:
            for adapted in _list_adapted(module):
                divide_adapter(adapted)
                shard_adapter(adapted, parallel)
            if tensors is None and not is_meta:  # drawn for the whole layer: the same at every sharding
                whole = _build_shape_only(layer)
                self._inject_random(whole, index, layer)
                tensors = {name: whole.get_parameter(name) for name in adapter_names(whole)}
            shards = read_shards(module, parallel, expert_parallel)
            tensors = tensors and {name: t if t is None else shards.take(name, t) for name, t in tensors.items()}
        if starts_from_base(self.config.init_lora_weights):
            if is_meta:
                describe_starts(module)
            elif tensors is None:
                with self._seeded(index):
                    start_from_base(module, str(self.config.init_lora_weights))
            else:
                tensors = restore_starts(module, tensors)
        if tensors:
            fill_adapter(module, tensors)

    def list_frozen(self, module: nn.Module, layer: Layer) -> tuple[str, ...]:
        """Return the weights of a layer's module, without an adapter yet, that are held in `form`: its stacks of
        experts, and its projections where the form is theirs too (of those in files some may not have it)."""
        if self.form is None or is_saved(layer, self.config) or not list_targets(module, layer, self.config):
            return ()
        return tuple(name for name in list_held(module, self.form) if not self._is_unkept(layer.hf_prefix + name))

    def _is_unkept(self, name: str) -> bool:
        """Return whether the module of a weight is one of those, is in one, or ends in such a name."""
        module = name.removesuffix(".weight")
        return any(f"{module}.".startswith(f"{each}.") or module.endswith(each) for each in self.unkept)

    def list_quantized(self, layers: Sequence[Layer]) -> list[str]:
        """Return the prefixes of the layers whose projections and experts are held in `form`; with its name, unless
        that is nf4."""
        if self.form is None:
            return []
        ending = "" if self.in_4bit else f" in {self.form}"
        unsaved = [layer for layer in layers if not is_saved(layer, self.config)]
        return [
            layer.hf_prefix + ending for layer in unsaved if list_targets(layer.build_on_meta(), layer, self.config)
        ]

    def _fill_saved(self, module: nn.Module, layer: Layer, parallel: TensorParallel) -> None:
        """Load the initial weights of a module in `modules_to_save`."""
        if not self.tensors:
            return
        shards, names = read_shards(module, parallel), [name for name, _ in module.named_parameters()]
        tensors = {name: self.tensors.get(to_peft_name(name, layer)) for name in names}
        fill_parameters(module, {name: t if t is None else shards.take(name, t) for name, t in tensors.items()}, names)

    def _inject_random(self, module: nn.Module, index: int, layer: Layer) -> None:
        with self._seeded(index):
            inject_adapter(self.config, module, layer)

    @contextmanager
    def _seeded(self, index: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.seed * 1_000_003 + index) % 2**64)  # a larger one raises
            yield


def _build_shape_only(layer: Layer) -> nn.Module:
    """Build the layer's module on the CPU, each parameter one number expanded to its shape: peft reads shapes alone."""
    module = layer.build_on_meta()
    for name, parameter in list(module.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        expanded = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        setattr(module.get_submodule(owner), own_name, nn.Parameter(expanded, requires_grad=False))
    return module


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Disable the module's adapters within the context."""
    adapted = _list_adapted(module)
    for child in adapted:
        child.enable_adapters(False)
    try:
        yield
    finally:
        for child in adapted:
            child.enable_adapters(True)


def _list_adapted(module: nn.Module) -> list[Any]:
    """Returns peft's wrappers around the parts that have adapters; around experts one for each stack, nested."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [child for child in module.modules() if isinstance(child, BaseTunerLayer)]


def adapter_names(module: nn.Module) -> list[str]:
    """Returns the names of the adapter parameters in a layer's module."""
    return [name for name, _ in module.named_parameters() if "lora_" in name]


@torch.no_grad()
def fill_adapter(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Copy `tensors` into the module's adapter parameters, by name. Raises UserError as `fill_parameters` does."""
    fill_parameters(module, tensors, adapter_names(module))


@torch.no_grad()
def fill_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor | None], names: Sequence[str]) -> None:
    """Copy `tensors` into the module's parameters `names`. Raises UserError for a tensor that is missing or has another
    shape."""
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
    """Add the adapters of a layer's module to its weights, in the dtype of these. Returns the changed weights, by their
    names without adapters: what is added is never rounded before the sum."""
    for adapted in _list_adapted(module):
        adapted.merge()
    return {
        name.replace(".base_layer", ""): parameter.detach()
        for name, parameter in module.named_parameters()
        if ".base_layer." in name and "lora_" not in name
    }


def check_all_taken(names: Collection[str], config: LoraConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for a tensor, by peft's name, that no layer would load: what it has learned would be lost."""
    taken = set(list_adapter_shapes(config, layers)) if names else set()
    if not layers[-1].owns_weights:
        taken.add(TIED_HEAD)
    if unused := sorted(set(names) - taken):
        raise UserError(
            f"the adapter's '{unused[0]}' does not belong to a projection or an expert of a decoder layer of this "
            "model, or to a module in modules_to_save; only those are supported"
        )


def list_adapter_shapes(config: LoraConfig, layers: Sequence[Layer]) -> dict[str, torch.Size]:
    """Return the shapes of all tensors that the config puts on these layers, by their names in a peft folder; those of
    modules in `modules_to_save` too."""
    return {name: shape for layer in layers for name, shape in _list_shapes(config, layer).items()}


def _list_shapes(config: LoraConfig, layer: Layer) -> dict[str, torch.Size]:
    module = layer.build_on_meta()
    if is_saved(layer, config):
        return {to_peft_name(name, layer): parameter.shape for name, parameter in module.named_parameters()}
    if not list_targets(module, layer, config):
        return {}
    inject_adapter(config, module, layer)
    return {to_peft_name(name, layer): module.get_parameter(name).shape for name in adapter_names(module)}


def inject_adapter(config: LoraConfig, module: nn.Module, layer: Layer) -> None:
    """Put adapters with random matrices on the targets of a layer's module; on meta where the module is."""
    from peft import inject_adapter_in_model

    from models.adapters.fused import fuse_products
    from models.experts.lora import peft_orientation, use_grouped_products

    targets = list_targets(module, layer, config)
    exact = copy.deepcopy(config)
    exact.target_modules, exact.target_parameters = list(targets.projections), list(targets.parameters) or None
    exact.modules_to_save, exact.ensure_weight_tying = None, False  # those are other layers
    for key in ("rank_pattern", "alpha_pattern"):
        setattr(exact, key, _name_in_layer(getattr(config, key), targets, layer, config))
    if starts_from_base(config.init_lora_weights):
        exact.init_lora_weights = True  # until the base weights are loaded
    is_meta = next(module.parameters()).is_meta
    with warnings.catch_warnings(), torch.device("meta" if is_meta else "cpu"), peft_orientation(module):
        # about rank patterns for a parameter
        warnings.simplefilter("ignore", RuntimeWarning)
        inject_adapter_in_model(exact, module, adapter_name=ADAPTER_NAME)
    fuse_products(module)
    use_grouped_products(module)


def _name_in_layer(
    pattern: Mapping[str, Any], targets: AdapterTargets, layer: Layer, config: LoraConfig
) -> dict[str, Any]:
    """Returns `rank_pattern` or `alpha_pattern` for one layer's module: peft matches the names in the whole model. A
    projection that is a target by the name of its weight is matched by that name."""
    from peft.utils.other import get_pattern_key

    full = {name: layer.hf_prefix + name for name in (*targets.projections, *targets.parameters)}
    modules = config.target_modules or ()
    full |= {name: f"{full[name]}.weight" for name in targets.projections if not is_named(full[name], modules)}
    keys = {name: get_pattern_key(list(pattern), whole) for name, whole in full.items()}
    return {f"^{re.escape(name)}": pattern[key] for name, key in keys.items() if key in pattern}
