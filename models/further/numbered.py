"""The names of DeepSeek-V3 and GLM-4.5: the layers continue the numbers of the decoder layers, and each has a copy of
embedding and head.

    model.layers.61.{enorm,hnorm,eh_proj}      norms of embedding and hidden states, projection
    model.layers.61.{self_attn,mlp,...}        a decoder layer
    model.layers.61.shared_head.norm           the norm before the head
    model.layers.61.{embed_tokens,shared_head.head}   copies, which are written from the model's own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.further.layers import FurtherDecoderLayer, Joined, apply_norm, build_norm
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer

# Of a layer: name of a copy -> whether it is the head's
COPIES: Mapping[str, bool] = {"embed_tokens.weight": False, "shared_head.head.weight": True}
MOST_DEPTHS: int | None = None  # each has its own layer
UNSTATED_DEPTHS = 0


class NumberedLayer(FurtherDecoderLayer):
    """Mixin before the decoder layer of a family."""

    def __init__(self, config: PretrainedConfig, template: Layer, norm: Layer, depth: int, num_depths: int) -> None:
        super().__init__(*template.args)
        self.place(config, depth, num_depths)
        self.enorm, self.hnorm, self.eh_proj = build_norm(norm), build_norm(norm), Joined(config)
        self.shared_head = nn.ModuleDict({"norm": build_norm(norm)})

    def combine(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.eh_proj(
            torch.cat([apply_norm(self.enorm, embeddings), apply_norm(self.hnorm, hidden_states)], dim=-1)
        )

    def decode(self, inputs: Any) -> torch.Tensor:
        return PipelineDecoderLayer.forward(self, inputs)[0]

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return apply_norm(self.shared_head["norm"], hidden_states)


def build_layers(config: PretrainedConfig, decoder: Sequence[Layer], norm: Layer, num_depths: int) -> list[Layer]:
    """Return the layer of each depth. decoder: the decoder layers. norm: the final one."""
    template = decoder[-1]  # of a mixture it has experts, as these have
    module_class = type("FurtherDecoderLayer", (NumberedLayer, template.module_class), {})
    base = template.hf_prefix.rstrip(".").rpartition(".")[0]
    return [
        Layer(
            f"{base}.{len(decoder) + depth - 1}.",
            module_class,
            (config, template, norm, depth, num_depths),
            is_further=True,
            num_blocks=1 + num_depths,
        )
        for depth in range(1, 1 + num_depths)
    ]
