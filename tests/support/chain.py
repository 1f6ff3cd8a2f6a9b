"""The layers of a model in one process, without DeepSpeed; and what is compared with them."""

from __future__ import annotations

import torch
from support.tiny import VOCAB_SIZE
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from models.architecture.lookup import build_layers
from models.layers.layer import Layer

B, T = 3, 24
BOUND = 1e-5


class Chain(nn.Module):
    """The layers one after the other; those that share a module hold one."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = model.config
        self.layers: list[Layer] = build_layers(model.config)
        shared: dict[str, nn.Module] = {}
        built = []
        for layer in self.layers:
            module = shared.get(layer.tied_key) if layer.tied_key else None
            if module is None:
                module = layer.module_class(*layer.args)
                weights = model.state_dict()
                module.load_state_dict({name: weights[layer.hf_prefix + name] for name in module.state_dict()})
            if layer.tied_key:
                shared[layer.tied_key] = module
            built.append(module)
        self.stages = nn.ModuleList(built)

    def run(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the last layer passes to the loss: hidden states [B, T, D], head weight [V, D]."""
        inputs = (input_ids, position_ids, count_segments(position_ids))
        for layer, module in zip(self.layers, self.stages, strict=True):
            inputs = layer.forward_fn(module, inputs) if layer.forward_fn else module(inputs)
        return inputs

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V], as the loss makes them."""
        logits = F.linear(*self.run(input_ids, position_ids))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Hugging Face name -> gradient, of what is trained."""
        pairs = [(layer, module) for layer, module in zip(self.layers, self.stages, strict=True) if layer.owns_weights]
        return {
            layer.hf_prefix + name: p.grad
            for layer, module in pairs
            for name, p in module.named_parameters()
            if p.requires_grad
        }


def positions(length: int = T) -> torch.Tensor:
    return torch.arange(length).repeat(B, 1)


def count_segments(position_ids: torch.Tensor) -> torch.Tensor:
    """segment_ids int32 [B, T] of rows without padding, whose documents begin where positions restart."""
    return (position_ids == 0).cumsum(dim=1).to(torch.int32)


def tokens(length: int = T) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (B, length), generator=torch.Generator().manual_seed(1))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()
