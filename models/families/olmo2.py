"""OLMo 2: norms after attention and feed-forward instead of before them, norms on queries and keys."""

from __future__ import annotations

from transformers import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RMSNorm, Olmo2RotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer, Style, Styles


class DecoderLayer(PipelineDecoderLayer, Olmo2DecoderLayer):
    pass


class FinalNorm(PipelineNorm, Olmo2RMSNorm):
    pass


def tensor_parallel_plan(config: Olmo2Config) -> Styles:
    """Return the plan: transformers gathers queries and keys for their norms, which run over all heads; here the norms
    are sharded too."""
    attention = {
        "q_proj": Style.COLUMN,
        "k_proj": Style.COLUMN,
        "v_proj": Style.COLUMN,
        "q_norm": Style.NORM,
        "k_norm": Style.NORM,
    }
    mlp = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
    return {
        **{f"self_attn.{name}": style for name, style in attention.items()},
        "self_attn.o_proj": Style.ROW,
        **{f"mlp.{name}": style for name, style in mlp.items()},
    }


def build_layers(config: Olmo2Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, Olmo2RotaryEmbedding(config)))
