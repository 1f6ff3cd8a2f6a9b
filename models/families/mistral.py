"""Mistral: a Llama whose attention looks back no further than a sliding window (2310.06825)."""

from __future__ import annotations

from transformers import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer
from models.layers.sharding_styles import read_published_plan

tensor_parallel_plan = read_published_plan
RING_ATTENTION = True


class DecoderLayer(PipelineDecoderLayer, MistralDecoderLayer):
    pass


class FinalNorm(PipelineNorm, MistralRMSNorm):
    pass


def build_layers(config: MistralConfig) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, MistralRotaryEmbedding(config)))
