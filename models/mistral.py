"""Mistral: a Llama whose attention looks back no further than a sliding window (2310.06825)."""

from __future__ import annotations

from transformers import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding

from models.context import MicroBatchContext
from models.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layer import Layer
from models.parallel.plan import read_published_plan

tensor_parallel_plan = read_published_plan
RING_ATTENTION = True


class DecoderLayer(PipelineDecoderLayer, MistralDecoderLayer):
    pass


class FinalNorm(PipelineNorm, MistralRMSNorm):
    pass


def build_layers(config: MistralConfig) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, MistralRotaryEmbedding(config)))
