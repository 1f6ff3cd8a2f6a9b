"""OLMo 2: norms behind attention and feed-forward instead of before them, norms on queries and keys."""

from __future__ import annotations

from transformers import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RMSNorm, Olmo2RotaryEmbedding

from models.architecture import Layer
from models.decoder import DecoderContext, PipelineDecoderLayer, PipelineNorm, build_decoder

NOT_CUT = "its norms of queries and keys run over all heads"


class DecoderLayer(PipelineDecoderLayer, Olmo2DecoderLayer):
    pass


class FinalNorm(PipelineNorm, Olmo2RMSNorm):
    pass


def build_layers(config: Olmo2Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, DecoderContext(config, Olmo2RotaryEmbedding(config)))
