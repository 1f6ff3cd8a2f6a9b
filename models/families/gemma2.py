"""Gemma 2 (2408.00118): scaled embedding, soft caps on attention scores and logits, windows in every other layer, tied
head.

The cap on the logits is applied in the loss (`models.losses.cross_entropy.build_loss`); the one on attention scores
rules out SDPA.
"""

from __future__ import annotations

import torch
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RMSNorm, Gemma2RotaryEmbedding

from models.layers.context import MicroBatchContext
from models.layers.decoder import Embedding, PipelineDecoderLayer, PipelineNorm, build_decoder
from models.layers.layer import Layer
from models.layers.sharding_styles import read_published_plan

ATTENTION_IMPLEMENTATIONS = ("eager", "flash_attention_2", "flash_attention_3", "flex_attention")
tensor_parallel_plan = read_published_plan


class ScaledEmbedding(Embedding):
    """Token embedding times sqrt(D), the factor rounded to the training dtype as Google's own code does."""

    def look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden_states = super().look_up(input_ids)
        scale = torch.tensor(self.embedding_dim**0.5).to(hidden_states.dtype).item()
        return hidden_states * scale


class DecoderLayer(PipelineDecoderLayer, Gemma2DecoderLayer):
    pass


class FinalNorm(PipelineNorm, Gemma2RMSNorm):
    pass


def build_layers(config: Gemma2Config) -> list[Layer]:
    context = MicroBatchContext(config, Gemma2RotaryEmbedding(config))
    return build_decoder(config, DecoderLayer, FinalNorm, context, embedding=ScaledEmbedding)
