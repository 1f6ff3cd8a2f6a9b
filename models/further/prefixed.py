"""The names of Qwen3-Next: one module next to the backbone, with its decoder layer in a list.

mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc}   norms of embedding and hidden states, projection
mtp.layers.0.*                                      a decoder layer with full attention
mtp.norm                                            the norm before the head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.further.layers import FurtherDecoderLayer, Joined, apply_norm, build_norm
from models.layers.decoder import PipelineDecoderLayer, get_attention_type
from models.layers.layer import Layer

COPIES: Mapping[str, bool] = {}
MOST_DEPTHS: int | None = 1  # further depths would share all but the decoder layer
UNSTATED_DEPTHS = 1  # Qwen3-Next's config.json does not count it


class PrefixedLayer(FurtherDecoderLayer):
    """The module `mtp`."""

    decoder_prefix = "layers.0."

    def __init__(self, config: PretrainedConfig, template: Layer, norm: Layer) -> None:
        nn.Module.__init__(self)
        self.place(config, 1, 1)
        self.fc, self.norm = Joined(config), build_norm(norm)
        self.layers = nn.ModuleList([template.module_class(*template.args)])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = build_norm(norm), build_norm(norm)
        inner = self._decoder
        self.context, self.attention_type, self.layer_idx = inner.context, inner.attention_type, inner.layer_idx

    @property
    def _decoder(self) -> PipelineDecoderLayer:
        inner = self.layers[0]
        assert isinstance(inner, PipelineDecoderLayer)
        return inner

    def combine(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        embeddings = apply_norm(self.pre_fc_norm_embedding, embeddings)
        return self.fc(torch.cat([embeddings, apply_norm(self.pre_fc_norm_hidden, hidden_states)], dim=-1))

    def decode(self, inputs: Any) -> torch.Tensor:
        return self._decoder(inputs)[0]

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return apply_norm(self.norm, hidden_states)

    def set_tp_heads(self, rank: int, size: int) -> None:
        self._decoder.set_tp_heads(rank, size)


def build_layers(config: PretrainedConfig, decoder: Sequence[Layer], norm: Layer, num_depths: int) -> list[Layer]:
    """Return the one layer. decoder: the decoder layers. norm: the final one."""
    full = [index for index in range(len(decoder)) if get_attention_type(config, index) == "full_attention"]
    template = decoder[full[-1]]
    return [Layer("mtp.", PrefixedLayer, (config, template, norm), is_further=True, num_blocks=2)]
