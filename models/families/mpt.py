"""MPT: ALiBi (2108.12409) in place of positions, no biases, tied head.

`transformers` has one attention for it, computed inline: scores of [B, heads, T, T] are made, whatever
`attn_implementation` says.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, build_mpt_alibi_tensor

from errors import UserError
from models.layers.context import Activations, MicroBatchContext
from models.layers.decoder import FinalLayerNorm, Names, PipelineDecoderLayer, build_decoder
from models.layers.layer import Fused, Layer, Style, Styles

ATTENTION_IMPLEMENTATIONS = ("eager",)
SEQUENCE_OBSTACLE = "transformers computes its attention inline, with no function that could be replaced"
NAMES = Names("transformer.wte.", "transformer.blocks.{}.", "transformer.norm_f.", "lm_head.")


class AlibiContext(MicroBatchContext):
    """The causal mask as booleans (True: hidden), and ALiBi's bias, which grows with the key's place in the row.

    A softmax does not see what is added to all of its scores, so the bias holds for each document of a packed row too.
    """

    def __init__(self, config: MptConfig) -> None:
        super().__init__(config)
        self.heads = slice(None)  # this rank's

    def derive_shared(self, inputs: Activations) -> dict[str, Any]:
        hidden_states = inputs[0]
        bias = build_mpt_alibi_tensor(self.config.n_heads, hidden_states.shape[1], device=hidden_states.device)
        return {"position_bias": bias[self.heads]}  # [heads, 1, T]

    def build_mask(self, inputs: Activations, attention_type: str) -> torch.Tensor:
        mask = super().build_mask(inputs, attention_type)
        assert isinstance(mask, torch.Tensor)  # eager attention takes no other
        return mask.to(torch.bool)  # [B or 1, 1, T, T]


class DecoderLayer(PipelineDecoderLayer, MptBlock):
    def set_tp_heads(self, rank: int, size: int) -> None:
        attention, context = self.attn, self.context
        assert isinstance(attention, MptAttention) and isinstance(context, AlibiContext)
        attention.n_heads //= size
        context.heads = slice(rank * attention.n_heads, (rank + 1) * attention.n_heads)

    def forward(self, inputs: Activations) -> Activations:
        (hidden_states, _attention_weights), *integers = super().forward(inputs)
        return hidden_states, *integers


class FinalNorm(FinalLayerNorm):
    def __init__(self, config: MptConfig) -> None:
        super().__init__(config, bias=False)


def tensor_parallel_plan(config: MptConfig) -> Styles:
    width = config.hidden_size
    return {
        "attn.Wqkv": Fused((width, width, width)),
        "attn.out_proj": Style.ROW,
        "ffn.up_proj": Style.COLUMN,
        "ffn.down_proj": Style.ROW,
    }


def build_layers(config: MptConfig) -> list[Layer]:
    """Return the layers. Raises UserError for features of MosaicML's own code that `transformers` ignores silently."""
    for field, ignored in {"prefix_lm": False, "qk_ln": False, "alibi": True}.items():
        if getattr(config.attn_config, field) != ignored:
            raise UserError(
                f"config.json: attn_config.{field}={getattr(config.attn_config, field)} "
                "is not supported by transformers' MPT"
            )
    return build_decoder(config, DecoderLayer, FinalNorm, AlibiContext(config), names=NAMES)
