"""Qwen3: norms on queries and keys, a head size of its own."""

from __future__ import annotations

from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer
from models.layers.sharding_styles import read_published_plan

tensor_parallel_plan = read_published_plan
RING_ATTENTION = True


class DecoderLayer(PipelineDecoderLayer, Qwen3DecoderLayer):
    pass


class FinalNorm(PipelineNorm, Qwen3RMSNorm):
    pass


def build_layers(config: Qwen3Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, Qwen3RotaryEmbedding(config)))
