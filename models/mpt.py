"""MPT: ALiBi (2108.12409) in place of positions, no biases, tied head.

`transformers` has one attention for it, written out: scores of [B, heads, T, T] are made, whatever `attn_implementation` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptBlock, build_mpt_alibi_tensor

from errors import UserError
from models.architecture import Layer
from models.decoder import Activations, DecoderContext, FinalLayerNorm, Names, PipelineDecoderLayer, build_decoder

ATTENTION_IMPLEMENTATIONS = ("eager",)
NAMES = Names("transformer.wte.", "transformer.blocks.{}.", "transformer.norm_f.", "lm_head.")

NOT_CUT = "its q, k and v are rows of one matrix"


class AlibiContext(DecoderContext):
    """The causal mask as booleans (True: hidden), and ALiBi's bias, which grows with the key's place in the row.

    A softmax does not see what is added to all of its scores, so the bias holds for each document of a packed row too.
    """

    def __init__(self, config: MptConfig) -> None:
        super().__init__(config, nn.Identity())

    def _compute(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        bias = build_mpt_alibi_tensor(self.config.n_heads, hidden_states.shape[1], device=hidden_states.device)
        return {"position_bias": bias}  # [heads, 1, T]

    def _mask(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, attention_type: str) -> torch.Tensor:
        mask = super()._mask(hidden_states, position_ids, attention_type)
        assert isinstance(mask, torch.Tensor)  # eager attention knows no other
        return mask.to(torch.bool)  # [B or 1, 1, T, T]


class DecoderLayer(PipelineDecoderLayer, MptBlock):
    def forward(self, inputs: Activations) -> Activations:
        (hidden_states, _attention_weights), position_ids = super().forward(inputs)
        return hidden_states, position_ids


class FinalNorm(FinalLayerNorm):
    def __init__(self, config: MptConfig) -> None:
        super().__init__(config, bias=False)


def build_layers(config: MptConfig) -> list[Layer]:
    """Raises UserError for what MosaicML's own code has and `transformers` leaves out without a word."""
    for field, ignored in {"prefix_lm": False, "qk_ln": False, "alibi": True}.items():
        if getattr(config.attn_config, field) != ignored:
            raise UserError(f"config.json: attn_config.{field}={getattr(config.attn_config, field)} is not carried by transformers' MPT")
    return build_decoder(config, DecoderLayer, FinalNorm, AlibiContext(config), names=NAMES)
