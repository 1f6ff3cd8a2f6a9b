"""GLM-5: DeepSeek-V3.2 with other sizes, and another rotation in its indexers.

The indexers are frozen (`models/layers/indexed_attention.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaRotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

from errors import UserError
from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.indexed_attention import KERNELS, OBSTACLE, IndexedAttention, IndexedContext
from models.layers.layer import Layer, Styles, refuse_sharding

ATTENTION_IMPLEMENTATIONS = KERNELS
SEQUENCE_OBSTACLE = OBSTACLE


class Attention(IndexedAttention):
    rotate_index = staticmethod(apply_rotary_pos_emb_interleave)

    def forward(self, *args: Any, **given: Any) -> tuple[torch.Tensor, None, None]:
        """Return the outputs where the layer of `transformers` looks for them."""
        return *super().forward(*args, **given), None


class DecoderLayer(PipelineDecoderLayer, GlmMoeDsaDecoderLayer):
    def __init__(self, config: GlmMoeDsaConfig, layer_idx: int, context: MicroBatchContext) -> None:
        super().__init__(config, layer_idx, context)
        self.self_attn = Attention(config, layer_idx)

    def transform(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        outputs: Any = super().transform(hidden_states, **given)
        return outputs[0]


class FinalNorm(PipelineNorm, GlmMoeDsaRMSNorm):
    pass


def tensor_parallel_plan(config: GlmMoeDsaConfig) -> Styles:
    """Raise UserError: the ranks that share a layer would have to select the same keys."""
    raise refuse_sharding(config, OBSTACLE)


def build_layers(config: GlmMoeDsaConfig) -> list[Layer]:
    """Raise UserError for layers that attend to the keys that earlier ones have selected."""
    if "shared" in config.indexer_types:
        raise UserError(
            f"a '{config.model_type}' with layers that attend to the keys that earlier ones have selected "
            "(indexer_types: shared) cannot be trained"
        )
    return build_decoder(config, DecoderLayer, FinalNorm, IndexedContext(config, GlmMoeDsaRotaryEmbedding(config)))
