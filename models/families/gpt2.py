"""GPT-2, and the architecture of GPT-3: learned positions, biases everywhere, layer norms, dropout, tied head.

The position table is a layer of its own after the token embedding: a tied head shares the token embedding alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from models.layers.context import Activations, MicroBatchContext
from models.layers.decoder import FinalLayerNorm, Names, PipelineDecoderLayer, build_decoder
from models.layers.layer import Fused, Layer, Style, Styles
from models.parallel.shard import NO_CP, ContextParallel

LEARNED_POSITIONS = True
NAMES = Names("transformer.wte.", "transformer.h.{}.", "transformer.ln_f.", "lm_head.")


class PositionEmbedding(nn.Embedding):
    """Adds the learned position to the token embedding."""

    sequence_part: ContextParallel = NO_CP
    hidden_part: ContextParallel = NO_CP  # of that part, with sequence parallelism

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.embd_pdrop)

    def forward(self, inputs: Activations) -> Activations:
        hidden_states, position_ids, _ = inputs
        position_ids = self.hidden_part.take(self.sequence_part.take(position_ids))
        return self.dropout(hidden_states + super().forward(position_ids)), *inputs[1:]


class DecoderLayer(PipelineDecoderLayer, GPT2Block):
    def set_tp_heads(self, rank: int, size: int) -> None:
        attention: Any = self.attn
        attention.num_heads //= size
        attention.split_size //= size


def tensor_parallel_plan(config: GPT2Config) -> Styles:
    width = config.hidden_size
    return {
        "attn.c_attn": Fused((width, width, width)),
        "attn.c_proj": Style.ROW,
        "mlp.c_fc": Style.COLUMN,
        "mlp.c_proj": Style.ROW,
    }


def build_layers(config: GPT2Config) -> list[Layer]:
    layers = build_decoder(config, DecoderLayer, FinalLayerNorm, MicroBatchContext(config), names=NAMES)
    return [layers[0], Layer("transformer.wpe.", PositionEmbedding, (config,)), *layers[1:]]
