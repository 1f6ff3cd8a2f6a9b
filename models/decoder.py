"""What decoder architectures share: embedding, norm and head on tuples, and the bridge to `transformers`' decoder layers.

The classes subclass the modules whose parameters they hold, so a layer's parameter names are the Hugging Face names without
their prefix. B micro-batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from models.layer import Layer

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Activations = tuple[torch.Tensor, torch.Tensor]  # hidden_states [B, T, D], position_ids [B, T]

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


@dataclass(frozen=True)
class Names:
    """Where a Hugging Face checkpoint keeps the parts of a decoder."""

    embedding: str = "model.embed_tokens."
    layer: str = "model.layers.{}."
    norm: str = "model.norm."
    head: str = "lm_head."


class Embedding(nn.Embedding):
    """Token embedding. `padding_idx` follows Hugging Face: that row gets no gradient from the input side."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def forward(self, inputs: Activations) -> Activations:
        input_ids, position_ids = inputs
        return super().forward(input_ids), position_ids  # [B, T, D]


class DecoderContext:
    """What every decoder layer needs beside its input: rotary angles and the attention mask, made inside the stage.

    One object is shared by all layers of a stage and remembers the last micro-batch, so they are computed once a micro-batch.
    It is no `nn.Module` on purpose: the engine casts modules to the training dtype, and inverse frequencies rounded to bf16
    turn long positions into noise.
    """

    def __init__(self, config: PretrainedConfig, rotary: nn.Module) -> None:
        self.config = config
        self.rotary = rotary
        self._position_ids: torch.Tensor | None = None
        self._shared: dict[str, Any] = {}
        self._masks: dict[str, torch.Tensor | BlockMask | None] = {}

    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, attention_type: str) -> dict[str, Any]:
        """Keyword arguments for the `forward` of a layer whose attention is "full_attention" or "sliding_attention".

        The engine gives each micro-batch its own `position_ids` tensor and the layers hand it on untouched, so its identity
        (kept alive here) names the micro-batch. A checkpointed layer that recomputes later simply misses and computes again. Selective
        checkpointing follows a layer operator by operator, and must find the same ones again: it is not shown what is computed here.
        """
        with _disable_current_modes():
            if position_ids is not self._position_ids:
                self._shared = self._compute(hidden_states, position_ids)
                self._masks = {}
                self._position_ids = position_ids
            if attention_type not in self._masks:
                self._masks[attention_type] = self._mask(hidden_states, position_ids, attention_type)
        return {"position_ids": position_ids, "attention_mask": self._masks[attention_type], **self._shared}

    def _compute(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        """What all layers share."""
        self.rotary.to(hidden_states.device)
        return {
            "position_embeddings": self.rotary(hidden_states, position_ids=position_ids)
        }  # cos, sin [B, T, head_dim]

    def _mask(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, attention_type: str
    ) -> torch.Tensor | BlockMask | None:
        return _MASKS[attention_type](
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=None,  # right padding needs none; documents of a packed row are told apart by position_ids
            past_key_values=None,
            position_ids=position_ids,
        )


class PipelineDecoderLayer(nn.Module):
    """Mixin before a decoder layer of `transformers` whose forward takes the context's keywords and returns hidden states."""

    def __init__(self, config: PretrainedConfig, layer_idx: int, context: DecoderContext) -> None:
        super().__init__(config, layer_idx)
        self.context = context
        self.attention_type = get_attention_type(config, layer_idx)

    def forward(self, inputs: Activations) -> Activations:
        hidden_states, position_ids = inputs
        return super().forward(
            hidden_states, **self.context(hidden_states, position_ids, self.attention_type)
        ), position_ids

    def share_heads(self, rank: int, size: int) -> None:
        """Called when tensor parallelism has cut the projections among `size` ranks: for families whose attention asks how many heads it has."""


class PipelineNorm(nn.Module):
    """Mixin before a final norm of `transformers`, built as `norm(hidden_size, eps)`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs: Activations) -> Activations:
        hidden_states, position_ids = inputs
        return super().forward(hidden_states), position_ids


class FinalLayerNorm(PipelineNorm, nn.LayerNorm):  # type: ignore[misc]  # the mixin's forward is the one
    """The final norm of the older families. `bias` as in `nn.LayerNorm`."""

    def __init__(self, config: PretrainedConfig, bias: bool = True) -> None:
        nn.LayerNorm.__init__(self, config.hidden_size, eps=config.layer_norm_epsilon, bias=bias)


class LMHead(nn.Linear):
    """The output projection. It makes no logits: the loss does, from what it is handed here."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        return hand_to_loss(self, inputs)


def hand_to_loss(module: nn.Module, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden_states [B, T, D], weight [V, D]) for the loss; with tied embeddings `module` is the embedding.

    The weight goes out as a view: DeepSpeed puts backward hooks on a stage's outputs, and on a leaf they would pile up with each
    micro-batch (seen in 0.19.8, `register_output_backward_hooks`).
    """
    hidden_states, _ = inputs
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return hidden_states, weight.view_as(weight)


def get_attention_type(config: PretrainedConfig, layer_idx: int) -> str:
    """ "full_attention" or "sliding_attention": what the config says layer by layer, or else for all layers."""
    if getattr(config, "layer_types", None):
        return config.layer_types[layer_idx]
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def build_decoder(
    config: PretrainedConfig,
    decoder_layer: type[nn.Module],
    norm: type[nn.Module],
    context: DecoderContext,
    *,
    embedding: type[nn.Module] = Embedding,
    names: Names = Names(),
) -> list[Layer]:
    """Embedding, decoder layers, final norm, head; a tied head is the embedding used again."""
    tied = config.tie_word_embeddings
    tied_key = "embedding" if tied else None
    head = (
        Layer(names.embedding, embedding, (config,), tied_key, forward_fn=hand_to_loss)
        if tied
        else Layer(names.head, LMHead, (config,))
    )
    return [
        Layer(names.embedding, embedding, (config,), tied_key),
        *(Layer(names.layer.format(i), decoder_layer, (config, i, context)) for i in range(config.num_hidden_layers)),
        Layer(names.norm, norm, (config,)),
        head,
    ]
