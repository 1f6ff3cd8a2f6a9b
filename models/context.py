"""What the layers of a stage need beside hidden states, derived once per micro-batch from the integers that cross a
boundary.

B micro-batch, T sequence, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# hidden_states [B, T, D]; position_ids int64 [B, T], from 0 in each document; segment_ids int32 [B, T], 0 for padding,
# the documents of a row from 1. In front of the first layer input_ids int64 [B, T] take the place of hidden_states.
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class MicroBatchContext:
    """Attention masks and rotary angles of the micro-batch that a stage is working on.

    All layers of a stage share one object, and none of them derives such a thing for itself: whatever else follows from
    the integers of a micro-batch (cumulative lengths of its documents, its padding) is derived here, once, when a layer
    needs it. A family that differs overrides `derive_shared` or `build_mask`.

    Not an `nn.Module` on purpose: the engine casts modules to the training dtype, and inverse frequencies rounded to
    bf16 turn long positions into noise.
    """

    def __init__(self, config: PretrainedConfig, rotary: nn.Module | None = None) -> None:
        """rotary: the family's rotary embedding, or None for a family without."""
        self.config = config
        self.rotary = rotary
        self._position_ids: torch.Tensor | None = None
        self._shared: dict[str, Any] = {}
        self._masks: dict[str, torch.Tensor | BlockMask | None] = {}

    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, inputs: Activations, attention_type: str) -> dict[str, Any]:
        """Keyword arguments for the `forward` of a layer whose attention is "full_attention" or "sliding_attention".

        The engine gives each micro-batch its own `position_ids` tensor and the layers pass it on untouched, so its
        identity (kept alive here) names the micro-batch. A checkpointed layer that is recomputed later misses and
        computes again. Selective checkpointing follows a layer operator by operator and must find the same ones again,
        so what is computed here is hidden from it.
        """
        position_ids = inputs[1]
        with _disable_current_modes():
            if position_ids is not self._position_ids:
                self._shared, self._masks = self.derive_shared(inputs), {}
                self._position_ids = position_ids
            if attention_type not in self._masks:
                self._masks[attention_type] = self.build_mask(inputs, attention_type)
        return {"position_ids": position_ids, "attention_mask": self._masks[attention_type], **self._shared}

    def derive_shared(self, inputs: Activations) -> dict[str, Any]:
        """Keyword arguments that are the same for all layers."""
        if self.rotary is None:
            return {}
        hidden_states, position_ids, _ = inputs
        self.rotary.to(hidden_states.device)
        cos_and_sin = self.rotary(hidden_states, position_ids=position_ids)  # two of [B, T, head_dim]
        return {"position_embeddings": cos_and_sin}

    def build_mask(self, inputs: Activations, attention_type: str) -> torch.Tensor | BlockMask | None:
        """The mask of one type of attention, in the form that the attention implementation takes.

        Documents of a packed row are kept apart by positions that restart, as `transformers` does it. Padding needs no
        mask: it is behind the tokens, and its positions continue those of the last document, so a batch without packed
        rows has none at all.
        """
        hidden_states, position_ids, _ = inputs
        return _MASKS[attention_type](
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )
