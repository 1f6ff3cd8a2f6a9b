"""DeepSeek V3 (2412.19437): latent attention, the first layers dense, then a mixture of experts with one shared expert.

The bias that balances the experts' load is a buffer, kept in its own dtype and not trained. Layers past
`num_hidden_layers` in the published weights predict further tokens; they are left out, as `transformers` does.
"""

from __future__ import annotations

from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer, Style, Styles


class DecoderLayer(PipelineDecoderLayer, DeepseekV3DecoderLayer):
    pass


class FinalNorm(PipelineNorm, DeepseekV3RMSNorm):
    pass


def tensor_parallel_plan(config: DeepseekV3Config) -> Styles:
    """Return the plan: heads are cut after the compressed queries, keys and values, which each rank has whole, as it
    has the router. Dense layers have the MLP's parts, the others the experts'."""
    whole = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    attention = {
        "q_proj": Style.COLUMN,
        "q_b_proj": Style.COLUMN,
        "kv_b_proj": Style.COLUMN,
        "o_proj": Style.ROW,
    } | dict.fromkeys(whole, Style.SUMMED)
    mlp = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
    return {
        **{f"self_attn.{name}": style for name, style in attention.items()},
        **{f"mlp.{name}": style for name, style in mlp.items()},
        "mlp.experts": Style.EXPERTS,
        "mlp.gate": Style.SUMMED,
        **{f"mlp.shared_experts.{name}": style for name, style in mlp.items()},
    }


def build_layers(config: DeepseekV3Config) -> list[Layer]:
    return build_decoder(config, DecoderLayer, FinalNorm, MicroBatchContext(config, DeepseekV3RotaryEmbedding(config)))
