"""The optimizer's parameter groups: those of the key `parameter_groups`, and one for all other parameters.

Every stage has every group, in the same order, even if it is empty there: the engine sums norms over stages group by
group. A pattern is searched for in a parameter's Hugging Face name, as with `freeze`, so it means the same at every
layout; a tied weight has one name on both of its stages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.freeze import choose_trained
from models.adapters.options import AdapterName
from models.layers.layer import Layer
from training.config.schema import ParameterGroup, RunConfig
from training.pipeline.module import StageModule
from training.pipeline.weight_sharding import whole_shape

# Key of a group: its learning rate divided by the run's, whose schedule scales all groups.
LR_RATIO = "lr_ratio"
# Names of norms and biases, which do not decay: those of the Trainer of transformers (5.23, get_decay_parameter_names)
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# The matrices B, and the vectors of DoRA
LORA_PLUS = r"\blora_(B|magnitude_vector)\b"

Named = Iterable[tuple[str, torch.Tensor]]


def list_entries(config: RunConfig) -> list[ParameterGroup]:
    """Return the entries of `parameter_groups` and, after them, that of `adapter.loraplus_lr_ratio` (LoRA+,
    2402.12354), the groups of `peft.optimizers.create_loraplus_optimizer`."""
    ratio = find_lora_plus_ratio(config)
    plus = [] if ratio is None else [ParameterGroup(LORA_PLUS, ratio * config.learning_rate)]
    return [*config.parameter_groups, *plus]


def find_lora_plus_ratio(config: RunConfig) -> float | None:
    """Return `adapter.loraplus_lr_ratio`; None for a run without an adapter, which does not read it."""
    return config.adapter.loraplus_lr_ratio if config.adapter.name is AdapterName.lora else None


def group_parameters(named: Named, config: RunConfig, layer_norms: Collection[int] = ()) -> list[dict[str, Any]]:
    """Return torch's parameter groups: what decays and what does not of those that no pattern matches, then the same of
    each entry. A parameter belongs to the first entry that matches it.

    named: the trained parameters of this rank, with their Hugging Face names. Norms and biases, as their names or
    `layer_norms` say, do not decay unless an entry gives a weight decay. layer_norms: the ids of the parameters of
    `nn.LayerNorm`, whatever their names.
    """
    entries = list_entries(config)
    chosen: list[list[torch.Tensor]] = [[] for _ in range(2 * (len(entries) + 1))]
    for name, parameter in named:
        stays = id(parameter) in layer_norms or _stays(name, parameter)
        chosen[2 * _find_entry(name, entries) + stays].append(parameter)
    groups = []
    for number, parameters in enumerate(chosen):
        entry = entries[number // 2 - 1] if number >= 2 else None
        decay = config.weight_decay if number % 2 == 0 else 0.0
        rate = config.learning_rate
        if entry is not None:
            decay = decay if entry.weight_decay is None else entry.weight_decay
            rate = rate if entry.learning_rate is None else entry.learning_rate
        ratio = rate / config.learning_rate if config.learning_rate else 1.0
        groups.append({"params": parameters, "lr": rate, "weight_decay": decay, LR_RATIO: ratio})
    return groups


def _stays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a norm or a bias by its name; for one without a name its shape says it."""
    return _UNDECAYED.search(name.lower()) is not None if name else len(whole_shape(parameter)) <= 1


def list_layer_norms(module: nn.Module) -> set[int]:
    """Return the ids of the parameters of the `nn.LayerNorm` in a module."""
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    return {id(parameter) for norm in norms for parameter in norm.parameters()}


def group_trained(module: StageModule, config: RunConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of a stage; some may be empty."""
    names = {id(parameter): name for name, parameter, _ in module.named_hf_parameters()}  # a loss's have no name
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return group_parameters([(names.get(id(each), ""), each) for each in trained], config, list_layer_norms(module))


def separate_copies(groups: list[dict[str, Any]], module: StageModule) -> list[dict[str, Any]]:
    """Split each group in four, so that weights that are replicated on other ranks of the stage, or tied to another
    stage, are separate from those that only this rank holds; all ranks have all groups.

    8-bit state has one scale per block: if the copies of a weight shared blocks with different neighbours, each rank
    would round them differently, and they would drift apart.
    """
    tied = {id(weight) for weight, _ in module.get_tied_weights_and_groups()}

    def find_kind(parameter: torch.Tensor) -> tuple[bool, bool]:
        is_replicated = module.ranks.parallel.size > 1 and not parameter.model_parallel  # type: ignore[attr-defined]
        return is_replicated, id(parameter) in tied

    kinds = list(product((False, True), repeat=2))
    return [
        group | {"params": [each for each in group["params"] if find_kind(each) == kind]}
        for group in groups
        for kind in kinds
    ]


def separate_fp32(groups: list[dict[str, Any]], module: StageModule) -> list[dict[str, Any]]:
    """Split each group in two, parameters of 16 bits and those that stay in fp32, since ZeRO makes one tensor of a
    group; all ranks have all groups."""
    kept = {id(parameter) for parameter in module.in_fp32}
    return [
        group | {"params": [each for each in group["params"] if (id(each) in kept) is in_fp32]}
        for group in groups
        for in_fp32 in (False, True)  # DeepSpeed takes the first parameter's dtype for that of the model
    ]


def _find_entry(name: str, entries: Sequence[ParameterGroup]) -> int:
    """The number of the first entry that matches, from 1; 0 where none does."""
    return next((number for number, entry in enumerate(entries, start=1) if re.search(entry.pattern, name)), 0)


def check_group_keys(config: RunConfig) -> None:
    """Raises UserError for an entry of `parameter_groups` that is wrong whatever the model is: an invalid pattern, a
    number out of range."""
    for number, entry in enumerate(config.parameter_groups, start=1):
        where = f"parameter_groups, entry {number}"
        try:
            re.compile(entry.pattern)
        except re.error as error:
            raise UserError(f"{where}: '{entry.pattern}' is not a valid regular expression ({error})") from None
        if entry.learning_rate is None and entry.weight_decay is None:
            raise UserError(f"{where}: '{entry.pattern}' changes nothing; give learning_rate, weight_decay or both")
        for key in ("learning_rate", "weight_decay"):
            value = getattr(entry, key)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"{where}: {key}={value}: 0 or more")
        if entry.learning_rate is not None and not config.learning_rate:
            raise UserError(
                f"{where}: learning_rate={entry.learning_rate}, but the run's learning_rate is 0: its schedule, as a "
                "share of that, scales each group's; give learning_rate more than 0"
            )


def check_parameter_groups(config: RunConfig, layers: Sequence[Layer], adapter: Adapter | None = None) -> None:
    """Raises UserError for an entry of `parameter_groups` whose pattern matches no trained parameter."""
    if not config.parameter_groups:
        return
    names = _list_trained(config, layers, adapter)
    taken = {_find_entry(name, config.parameter_groups) for name in names}
    for number, entry in enumerate(config.parameter_groups, start=1):
        if number not in taken:
            earlier = next((name for name in names if re.search(entry.pattern, name)), None)
            but = "" if earlier is None else f" but such as '{earlier}', which an earlier entry has"
            raise UserError(
                f"parameter_groups, entry {number}: '{entry.pattern}' matches no weight that is trained{but}; they are "
                f"named like '{names[0]}'"
            )


def _list_trained(config: RunConfig, layers: Sequence[Layer], adapter: Adapter | None) -> list[str]:
    """The names of all parameters that are trained, on whichever stage."""
    names = []
    for index, layer in enumerate(layers):
        if layer.owns_weights:
            module = layer.build_on_meta()
            choose_trained(module, index, layer, adapter, config.freeze)
            names += [layer.hf_prefix + name for name, each in module.named_parameters() if each.requires_grad]
    return names
