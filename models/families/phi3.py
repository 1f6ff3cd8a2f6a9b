"""Phi-3 and 3.5: fused projections (query-key-value, gate-up), long rope, a sliding window, residual dropout."""

from __future__ import annotations

import copy
from typing import Any

from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RMSNorm, Phi3RotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Fused, Layer, Style, Styles


class DecoderLayer(PipelineDecoderLayer, Phi3DecoderLayer):
    def set_tp_heads(self, rank: int, size: int) -> None:
        attention: Any = self.self_attn
        attention.config = copy.copy(attention.config)  # its forward looks up the number of queries there
        attention.config.num_attention_heads //= size
        attention.num_key_value_heads //= size


class FinalNorm(PipelineNorm, Phi3RMSNorm):
    pass


def tensor_parallel_plan(config: Phi3Config) -> Styles:
    """Return the plan: transformers cuts the fused projections without regard to q, k and v, and gathers; here each is
    sharded by itself."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "self_attn.qkv_proj": Fused((queries, keys, keys)),
        "self_attn.o_proj": Style.ROW,
        "mlp.gate_up_proj": Fused((config.intermediate_size, config.intermediate_size)),
        "mlp.down_proj": Style.ROW,
    }


def build_layers(config: Phi3Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, Phi3RotaryEmbedding(config)))
