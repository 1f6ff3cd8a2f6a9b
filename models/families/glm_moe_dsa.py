"""GLM-5: DeepSeek-V3.2 with another rotation in its indexers, and layers that reuse what an earlier one has selected
(2603.12201).

The indexers are frozen (`models/layers/indexed_attention.py`). A selection is passed on with the activations, so that a
layer that is recomputed has the one that it had; it takes up to two thirds of the memory of hidden states, and no stage
sends it: a stage begins with a layer that has an indexer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaRotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

from errors import UserError
from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.indexed_attention import KERNELS, OBSTACLE, IndexedAttention, IndexedContext
from models.layers.layer import Layer, Styles, refuse_sharding

ATTENTION_IMPLEMENTATIONS = KERNELS
SEQUENCE_OBSTACLE = OBSTACLE


class Attention(IndexedAttention):
    """Without an indexer in a layer that borrows a selection."""

    rotate_index = staticmethod(apply_rotary_pos_emb_interleave)

    def __init__(self, config: GlmMoeDsaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if is_shared(config, layer_idx):
            self.indexer = None


class DecoderLayer(PipelineDecoderLayer, GlmMoeDsaDecoderLayer):
    """borrows: whether it attends to the keys that an earlier layer has selected, which the layer before it passes on.
    lends: whether the next one does."""

    def __init__(self, config: GlmMoeDsaConfig, layer_idx: int, context: MicroBatchContext) -> None:
        super().__init__(config, layer_idx, context)
        self.self_attn = Attention(config, layer_idx)
        self.borrows, self.lends = (is_shared(config, index) for index in (layer_idx, layer_idx + 1))

    def complete_inputs(self, inputs: Any) -> Any:
        if not self.borrows or len(inputs) > 3:
            return inputs
        return *inputs, inputs[1].new_zeros(self._describe_selection(*inputs[1].shape), dtype=torch.int32)

    def count_lent(self, num_rows: int, length: int) -> int:
        makes = self.lends and not self.borrows
        return torch.int32.itemsize * math.prod(self._describe_selection(num_rows, length)) if makes else 0

    def _describe_selection(self, num_rows: int, length: int) -> tuple[int, int, int]:
        """Return the shape of a selection, [B, T - K, K]."""
        num_selected = self.context.config.index_topk
        return num_rows, max(0, length - num_selected), num_selected

    def forward(self, inputs: Any) -> Any:
        """inputs: activations, and after them the selection, where the layer before lends one; None where attention is
        dense."""
        hidden_states, position_ids, segment_ids, *selection = inputs
        given = self.context(inputs, self.attention_type, self.layer_idx)
        if self.borrows:
            (given["prev_topk_indices"],) = selection
        context = self.context
        outputs: Any = self.run(context.tokens, context.batches, hidden_states, **given)
        hidden_states, lent = outputs
        return hidden_states, position_ids, segment_ids, *([lent] if self.lends else [])


class FinalNorm(PipelineNorm, GlmMoeDsaRMSNorm):
    pass


def is_shared(config: GlmMoeDsaConfig, layer_idx: int) -> bool:
    """Return whether a layer attends to the keys that an earlier one has selected; False after the last one."""
    return layer_idx < config.num_hidden_layers and config.indexer_types[layer_idx] == "shared"


def tensor_parallel_plan(config: GlmMoeDsaConfig) -> Styles:
    """Raise UserError: the ranks that share a layer would have to select the same keys."""
    raise refuse_sharding(config, OBSTACLE)


def build_layers(config: GlmMoeDsaConfig) -> list[Layer]:
    """Raise UserError where no layer comes before the first one without an indexer."""
    if is_shared(config, 0):
        raise UserError(
            f"indexer_types of this '{config.model_type}' begins with 'shared', and its first layer has no earlier "
            "one whose selection it could attend to"
        )
    context = IndexedContext(config, GlmMoeDsaRotaryEmbedding(config))
    embedding, *layers = build_decoder(config, DecoderLayer, FinalNorm, context)
    return [embedding, *(replace(layer, is_joined=is_shared(config, i)) for i, layer in enumerate(layers))]
