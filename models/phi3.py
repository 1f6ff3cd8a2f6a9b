"""Phi-3 and 3.5: fused projections (query-key-value, gate-up), long rope, a sliding window, residual dropout."""

from __future__ import annotations

from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RMSNorm, Phi3RotaryEmbedding

from models.architecture import Layer
from models.decoder import DecoderContext, PipelineDecoderLayer, PipelineNorm, build_decoder

NOT_CUT = "its q, k and v are rows of one matrix, and so are the two halves of its MLP's"


class DecoderLayer(PipelineDecoderLayer, Phi3DecoderLayer):
    pass


class FinalNorm(PipelineNorm, Phi3RMSNorm):
    pass


def build_layers(config: Phi3Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, DecoderContext(config, Phi3RotaryEmbedding(config)))
