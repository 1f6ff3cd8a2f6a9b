"""gpt-oss (2508.10925): attention sinks, a window in every other layer, experts with a gate of their own and biases.

A sink is a learned score of each head that takes part in the softmax and has no value. SDPA cannot do that, so scores
of [B, heads, T, T] are made. Experts are stacked on disk too, their matrices transposed, gate and up interleaved.
"""

from __future__ import annotations

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer, GptOssRMSNorm, GptOssRotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer, Style, Styles

ATTENTION_IMPLEMENTATIONS = ("eager", "flex_attention")


class DecoderLayer(PipelineDecoderLayer, GptOssDecoderLayer):
    pass


class FinalNorm(PipelineNorm, GptOssRMSNorm):
    pass


def tensor_parallel_plan(config: GptOssConfig) -> Styles:
    """Return the plan; `transformers` publishes one for expert parallelism alone."""
    return {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), Style.COLUMN),
        "self_attn.o_proj": Style.ROW,
        "self_attn.sinks": Style.HEADS,
        "mlp.experts": Style.EXPERTS,
        "mlp.router": Style.SUMMED,
    }


def build_layers(config: GptOssConfig) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, GptOssRotaryEmbedding(config)))
