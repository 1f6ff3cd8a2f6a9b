"""Qwen2 and 2.5: biases on the query, key and value projections; a sliding window in the upper layers where the config
asks for it.
"""

from __future__ import annotations

from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer
from models.layers.sharding_styles import read_published_plan

tensor_parallel_plan = read_published_plan
RING_ATTENTION = True


class DecoderLayer(PipelineDecoderLayer, Qwen2DecoderLayer):
    pass


class FinalNorm(PipelineNorm, Qwen2RMSNorm):
    pass


def build_layers(config: Qwen2Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, Qwen2RotaryEmbedding(config)))
