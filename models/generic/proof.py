"""Whether layers are the model that `transformers` has: a small one must give the same loss and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from errors import UserError
from models.generic.assembly import assemble
from models.layer import Layer
from models.losses.cross_entropy import IGNORE_INDEX, build_loss

BOUND = 1e-5  # of a relative difference, in fp32


def compare_with_transformers(config: PretrainedConfig) -> tuple[float, str]:
    """The largest relative difference of loss and gradients, and of which tensor. Runs both models; for small ones."""
    layers = assemble(config)
    model, input_ids = build_small(config)
    with torch.random.fork_rng(devices=[]):  # a router may draw
        torch.manual_seed(0)
        expected = model(input_ids, labels=input_ids, use_cache=False).loss
        torch.manual_seed(0)
        loss, modules = run_layers(layers, model.state_dict(), input_ids, config)
    expected.backward()
    loss.backward()
    pairs = {"loss": (loss, expected)}
    named = dict(model.named_parameters())
    for layer, module in modules:
        pairs |= {
            layer.hf_prefix + name: (p.grad, named[layer.hf_prefix + name].grad)
            for name, p in module.named_parameters()
            if p.requires_grad
        }
    named = {name: p for name, p in named.items() if p.requires_grad}
    if missing := named.keys() - pairs.keys():
        raise UserError(f"it has parameters outside of these parts ('{min(missing)}')")
    return max(
        (((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item(), name)
        for name, (ours, theirs) in pairs.items()
    )


def build_small(config: PretrainedConfig) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model of a small config with random weights, the same at every call, and input_ids [2, 24]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model, torch.randint(3, config.vocab_size, (2, 24))


def run_layers(
    layers: list[Layer],
    weights: dict[str, torch.Tensor],
    input_ids: torch.Tensor,
    config: PretrainedConfig,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[tuple[Layer, nn.Module]]]:
    """The loss of the layers one after the other, and those that own weights with their modules. position_ids: one
    document a row by default."""
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1)
    activations: Any = (input_ids, position_ids, torch.ones_like(input_ids, dtype=torch.int32))
    modules: list[tuple[Layer, nn.Module]] = []
    shared: dict[str, nn.Module] = {}
    for layer in layers:
        if not layer.owns_weights:
            activations = layer.forward_fn(shared[layer.tied_key], activations)
            continue
        with torch.random.fork_rng(devices=[]):  # what initialisation draws would be missing in the pass
            module = layer.module_class(*layer.args)
        module.load_state_dict({name: weights[layer.hf_prefix + name] for name in module.state_dict()})
        modules.append((layer, module))
        if layer.tied_key:
            shared[layer.tied_key] = module
        activations = module(activations)
    targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    count = torch.tensor(float(input_ids[:, 1:].numel()))
    return build_loss(config)(activations, (targets, count)), modules
