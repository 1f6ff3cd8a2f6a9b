"""DeepSeek V3 (2412.19437): latent attention, the first layers dense, then a mixture of experts with one shared expert.

On disk each expert has its own matrices; in memory those of a layer are stacked, so that they can be multiplied in one
call. The bias that balances the experts' load is a buffer, kept in its own dtype and not trained. Layers past
`num_hidden_layers` in the published weights predict further tokens; they are left out, as `transformers` does.
"""

from __future__ import annotations

import re

from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from models.context import MicroBatchContext
from models.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.experts.grouped import GROUPED
from models.layer import Layer, Piece, Style, Styles


class DecoderLayer(PipelineDecoderLayer, DeepseekV3DecoderLayer):
    pass


class FinalNorm(PipelineNorm, DeepseekV3RMSNorm):
    pass


def tensor_parallel_plan(config: DeepseekV3Config) -> Styles:
    """Heads are cut behind the compressed queries, keys and values, which each rank has whole; the router too. Dense
    layers have the MLP's parts, the others the experts'.
    """
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
    if config._experts_implementation is None:
        config._experts_implementation = GROUPED
    layers = build_decoder(
        config, DecoderLayer, FinalNorm, MicroBatchContext(config, DeepseekV3RotaryEmbedding(config))
    )
    first_sparse = 1 + config.first_k_dense_replace
    for index in range(first_sparse, 1 + config.num_hidden_layers):
        layers[index] = layers[index].with_pieces(
            stacked_experts(config.n_routed_experts, config.moe_intermediate_size)
        )
    return layers


def stacked_experts(num_experts: int, intermediate_size: int) -> dict[str, list[Piece]]:
    """Which matrices on disk make up the stacked ones: gate_up_proj [experts, 2 x intermediate, D], down_proj [experts,
    D, intermediate].
    """
    gate, up = slice(0, intermediate_size), slice(intermediate_size, 2 * intermediate_size)
    name = "mlp.experts.{}.{}_proj.weight"
    return {
        "mlp.experts.gate_up_proj": [
            Piece(name.format(i, which), (i, rows))
            for i in range(num_experts)
            for which, rows in (("gate", gate), ("up", up))
        ],
        "mlp.experts.down_proj": [Piece(name.format(i, "down"), (i,)) for i in range(num_experts)],
    }


def ignored_tensors(config: DeepseekV3Config) -> re.Pattern[str]:
    """The layers that predict further tokens."""
    further = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return re.compile(rf"^model\.layers\.({'|'.join(map(str, further))})\.")
