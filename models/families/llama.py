"""Llama 1 to 3.x: rotary positions with every rope scaling of `transformers`, grouped-query attention, tied or untied
head.
"""

from __future__ import annotations

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer
from models.layers.sharding_styles import read_published_plan

tensor_parallel_plan = read_published_plan
RING_ATTENTION = True


class DecoderLayer(PipelineDecoderLayer, LlamaDecoderLayer):
    pass


class FinalNorm(PipelineNorm, LlamaRMSNorm):
    pass


def build_layers(config: LlamaConfig) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, LlamaRotaryEmbedding(config)))
