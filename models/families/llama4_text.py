"""Llama 4 (text): attention in chunks, layers without positions, experts that scale their inputs.

Two parts differ from transformers' (5.23): its experts multiply every token by every expert's matrices, most of them
zeros, and its layers without positions scale queries by their place in the row, not in their document.

B micro-batch, T sequence, D hidden, N tokens, K experts a token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Llama4TextConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import (
    Llama4Router,
    Llama4TextAttention,
    Llama4TextDecoderLayer,
    Llama4TextExperts,
    Llama4TextMoe,
    Llama4TextRMSNorm,
    Llama4TextRotaryEmbedding,
    eager_attention_forward,
)

from models.experts.grouped import compute_experts
from models.layers.context import Activations, MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer
from models.layers.packed_attention import VARLEN
from models.layers.sharding_styles import read_published_plan

ATTENTION_IMPLEMENTATIONS = ("sdpa", VARLEN, "eager", "flex_attention")
tensor_parallel_plan = read_published_plan


class Context(MicroBatchContext):
    """Passes layers without positions the factors that scale queries (2501.19399): they grow with the length of the
    document up to a token."""

    def derive_shared(self, inputs: Activations) -> dict[str, Any]:
        config = self.config
        chunks = torch.floor((inputs[1].float() + 1) / config.floor_scale)
        self._query_scales = (torch.log1p(chunks) * config.attn_scale + 1)[:, None, :, None]  # [B, 1, T, 1]
        return super().derive_shared(inputs)

    def give(self, inputs: Activations, attention_type: str, layer_idx: int) -> dict[str, Any]:
        given = super().give(inputs, attention_type, layer_idx)
        return {**given, "query_scales": self._query_scales} if scales_queries(self.config, layer_idx) else given


def scales_queries(config: Llama4TextConfig, layer_idx: int) -> bool:
    """Returns whether a layer scales its queries by their position: one without rotary angles may."""
    return bool(config.attn_temperature_tuning) and not config.no_rope_layers[layer_idx]


class ScaledAttention(Llama4TextAttention):
    """The attention of a layer without positions: no rotary angles, no norms. query_scales: [B, 1, T, 1]."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: Any,
        query_scales: torch.Tensor,
        **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = hidden_states.shape[:-1]
        queries, keys, values = (
            projection(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = (queries * query_scales).to(queries.dtype)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        outputs, weights = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **given
        )
        return self.o_proj(outputs.reshape(*shape, -1)), weights


class Router(Llama4Router):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [N, E], weights [N, K], indices [N, K], as transformers' other routers do."""
        logits = nn.Linear.forward(self, hidden_states)
        highest, indices = torch.topk(logits, self.top_k, dim=-1)
        return logits, highest.float().sigmoid().to(logits.dtype), indices


@use_experts_implementation(is_transposed=True)
class Experts(Llama4TextExperts):
    is_transposed_to_peft = False

    def forward(self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return compute_experts(self, hidden_states, indices, weights)


class MoE(Llama4TextMoe):
    """Computes only the chosen experts of each token."""

    def __init__(self, config: Llama4TextConfig) -> None:
        super().__init__(config)
        self.experts, self.router = Experts(config), Router(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits, weights, indices = self.router(hidden_states)
        inputs = (hidden_states.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1).to(hidden_states.dtype)  # [N x K, D]
        routed = self.experts(inputs, indices.view(-1, 1), torch.ones_like(weights.view(-1, 1)))
        return self.shared_expert(hidden_states) + routed.view(*indices.shape, -1).sum(dim=1), logits


class DecoderLayer(PipelineDecoderLayer, Llama4TextDecoderLayer):
    def __init__(self, config: Llama4TextConfig, layer_idx: int, context: MicroBatchContext) -> None:
        super().__init__(config, layer_idx, context)
        if self.is_moe_layer:
            self.feed_forward = MoE(config)
        if scales_queries(config, layer_idx):
            self.self_attn = ScaledAttention(config, layer_idx)


class FinalNorm(PipelineNorm, Llama4TextRMSNorm):
    pass


def build_layers(config: Llama4TextConfig) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, Context(config, Llama4TextRotaryEmbedding(config)))
