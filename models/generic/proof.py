"""Proves that layers compute what `transformers` does: a small model must give the same loss and gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from batch import IGNORE_INDEX, Targets
from errors import UserError
from models.experts.grouped import GROUPED
from models.generic.assembly import assemble
from models.generic.shrink import build_small
from models.layers.layer import Layer
from models.losses.cross_entropy import build_loss

BOUND = 1e-5  # of a relative difference, in fp32


def compare_with_transformers(
    config: PretrainedConfig, build_layers: Callable[[PretrainedConfig], list[Layer]] = assemble
) -> tuple[float, str]:
    """Return the largest relative difference of loss and gradients, and the name of that tensor. Runs both models; for
    small ones."""
    config._experts_implementation = GROUPED
    layers = build_layers(config)
    plain = copy.deepcopy(config)
    plain._experts_implementation = "eager"
    return compare(layers, *build_small(plain), config)


def compare(
    layers: list[Layer], model: PreTrainedModel, input_ids: torch.Tensor, config: PretrainedConfig
) -> tuple[float, str]:
    """Return the largest relative difference of loss and gradients between layers and the model whose names they have,
    and the name of that tensor. Parts of the model on the meta device belong to no layer.

    In float64, where the remaining rounding (of a model's own parts in fp32) does not put a difference in doubt. Raises
    UserError for a parameter outside of the layers, or without a gradient.
    """
    model.double()
    with torch.random.fork_rng(devices=[]):  # a router may draw
        torch.manual_seed(0)
        logits = model(input_ids, use_cache=False).logits[:, :-1]
        expected = nn.functional.cross_entropy(logits.flatten(0, 1).double(), input_ids[:, 1:].flatten())
        torch.manual_seed(0)
        loss, modules = run_layers(layers, model.state_dict(), input_ids, config)
    expected.backward()
    loss.backward()
    ours = list_gradients(modules)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and not p.is_meta}
    frozen = list_frozen(modules)
    theirs = {name: p.grad for name, p in named.items() if name not in frozen or p.grad is not None}
    if missing := theirs.keys() - ours.keys():
        raise UserError(f"it has parameters outside of these parts ('{min(missing)}')")
    if unmoved := [name for name in theirs if theirs[name] is None or ours[name] is None]:
        raise UserError(f"{_name_operation(unmoved[0])}: '{unmoved[0]}' has no gradient from the loss of tokens")
    return find_difference({"loss": loss} | ours, {"loss": expected} | theirs)


def list_gradients(modules: list[tuple[Layer, nn.Module]]) -> dict[str, torch.Tensor | None]:
    """Return Hugging Face name -> gradient."""
    return {
        layer.hf_prefix + name: parameter.grad
        for layer, module in modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def list_frozen(modules: list[tuple[Layer, nn.Module]]) -> set[str]:
    """Return the Hugging Face names of the parameters that the layers leave untrained."""
    return {
        layer.hf_prefix + name
        for layer, module in modules
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }


def find_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest relative difference of two tensors of the same name, and that name. A gradient that is nothing
    but rounding, such as that of a bias that a softmax cancels, is compared with 1e-6 of the largest."""
    least = 1e-6 * max(other.abs().max() for other in theirs.values())
    return max(
        (((ours[name] - other).abs().max() / other.abs().max().clamp(min=least)).item(), name)
        for name, other in theirs.items()
    )


def _name_operation(name: str) -> str:
    """Return the operation that a parameter without a gradient belongs to."""
    if "indexer" in name:
        return "indexed attention, whose indexer is trained to another loss"
    if re.search("encoder_attn|cross_?att", name):
        return "attention to the outputs of an encoder"
    return "a part that text alone does not use"


def run_layers(
    layers: list[Layer],
    weights: dict[str, torch.Tensor],
    input_ids: torch.Tensor,
    config: PretrainedConfig,
    position_ids: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[tuple[Layer, nn.Module]]]:
    """Run the layers one after the other in the dtype of the weights, and return the loss, and the layers that own
    weights with their modules. position_ids: one document per row by default. targets: the next tokens by default.
    segment_ids: no padding by default."""
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1)
    if segment_ids is None:
        segment_ids = torch.ones_like(input_ids, dtype=torch.int32)
    activations: Any = (input_ids, position_ids, segment_ids)
    modules: list[tuple[Layer, nn.Module]] = []
    shared: dict[str, nn.Module] = {}
    for layer in layers:
        if not layer.owns_weights:
            activations = layer.forward_fn(shared[layer.tied_key], activations)
            continue
        with torch.random.fork_rng(devices=[]):  # initialization must not draw from the forward pass's numbers
            module = layer.module_class(*layer.args).to(next(iter(weights.values())).dtype)
        module.load_state_dict({name: weights[layer.hf_prefix + name] for name in module.state_dict()})
        modules.append((layer, module))
        if layer.tied_key:
            shared[layer.tied_key] = module
        activations = module(activations)
    if targets is None:
        targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    count = (targets != IGNORE_INDEX).sum().float()
    return build_loss(config)(activations, Targets.find(targets, count)), modules
