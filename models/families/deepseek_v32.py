"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer, which selects the keys that a query attends to.

The indexer is frozen (`models/layers/indexed_attention.py`).
"""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32DecoderLayer,
    DeepseekV32RMSNorm,
    DeepseekV32RotaryEmbedding,
)

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.indexed_attention import KERNELS, OBSTACLE, IndexedAttention, IndexedContext
from models.layers.layer import Layer, Styles, refuse_sharding

ATTENTION_IMPLEMENTATIONS = KERNELS
SEQUENCE_OBSTACLE = OBSTACLE


class Attention(IndexedAttention):
    def forward(self, *args: Any, **given: Any) -> tuple[Any, ...]:
        """Return the outputs, and None in place of weights, as the layer of `transformers` takes them."""
        return super().forward(*args, **given)[:2]


class DecoderLayer(PipelineDecoderLayer, DeepseekV32DecoderLayer):
    def __init__(self, config: DeepseekV32Config, layer_idx: int, context: MicroBatchContext) -> None:
        super().__init__(config, layer_idx, context)
        self.self_attn = Attention(config, layer_idx)


class FinalNorm(PipelineNorm, DeepseekV32RMSNorm):
    pass


def tensor_parallel_plan(config: DeepseekV32Config) -> Styles:
    """Raise UserError: the ranks that share a layer would have to select the same keys."""
    raise refuse_sharding(config, OBSTACLE)


def build_layers(config: DeepseekV32Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, IndexedContext(config, DeepseekV32RotaryEmbedding(config)))
