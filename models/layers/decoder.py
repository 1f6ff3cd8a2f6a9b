"""The parts that decoder architectures share: embedding, norm and head on tuples, and the bridge to `transformers`'
decoder layers.

The classes subclass the modules whose parameters they hold, so a layer's parameter names are the Hugging Face names
without their prefix. B micro-batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.layers.context import Activations, MicroBatchContext
from models.layers.documents import TokenDocuments
from models.layers.layer import Layer
from models.layers.recurrent import DocumentBatches, isolate_documents
from models.parallel.sequence import gather_tokens
from models.parallel.shard import NO_TP


@dataclass(frozen=True)
class Names:
    """The prefixes of a decoder's parts in a Hugging Face checkpoint."""

    embedding: str = "model.embed_tokens."
    layer: str = "model.layers.{}."
    norm: str = "model.norm."
    head: str = "lm_head."


class Embedding(nn.Embedding):
    """Token embedding. `padding_idx` follows Hugging Face: that row gets no gradient from the input side.

    noise: maps the embeddings of training, [B, T, D], to what the layers get (`models/layers/neftune.py`); None for no
    change. lookup: maps token ids [B, T] to rows of the weight, [B, T, D], in place of torch's own function.
    """

    noise: Callable[[torch.Tensor], torch.Tensor] | None = None
    lookup: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def forward(self, inputs: Activations) -> Activations:
        embeddings = self.look_up(inputs[0])  # [B, T, D]
        if self.noise is not None and self.training:
            embeddings = self.noise(embeddings)
        return embeddings, *inputs[1:]

    def look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B, T, D] as the embedding of `transformers` does; families that scale them override
        this."""
        return super().forward(input_ids) if self.lookup is None else self.lookup(input_ids)

    @property
    def is_plain(self) -> bool:
        """Whether rows are looked up by torch's `nn.Embedding`, without options that change weights or gradients."""
        following = type(self).__mro__[type(self).__mro__.index(Embedding) + 1]
        return following is nn.Embedding and self.max_norm is None and not self.scale_grad_by_freq and not self.sparse


class PipelineDecoderLayer(nn.Module):
    """Mixin before a decoder layer of `transformers` whose forward takes the context's keywords and returns hidden
    states.

    recompute: the function by which a layer that checkpoints itself runs `transform`; None for a layer that does not.
    transform_apart: `transform`, or the compiled form of it, for a layer that cannot be compiled together with its
    checkpoint.
    """

    recompute: Callable[..., torch.Tensor] | None = None
    transform_apart: Callable[..., torch.Tensor] | None = None

    def __init__(self, config: PretrainedConfig, layer_idx: int, context: MicroBatchContext) -> None:
        super().__init__(config, layer_idx)
        self.attach_context(config, layer_idx, context)

    def attach_context(self, config: PretrainedConfig, layer_idx: int, context: MicroBatchContext) -> None:
        """Turn the layer of `transformers` that has been built into a pipeline layer with this context."""
        make_buffers_of_untrained(self)
        self.context = context
        self.attention_type, self.layer_idx = get_attention_type(config, layer_idx), layer_idx
        isolate_documents(self, context, self.attention_type)

    @property
    def number_in_model(self) -> int:
        """The place among the layers of the model, from 0."""
        return self.layer_idx

    def complete_inputs(self, inputs: Activations) -> Activations:
        """Return what the layer takes where it is run without the one before it: all that it needs of that one, beyond
        activations, as any values of the right shape."""
        return inputs

    def count_lent(self, num_rows: int, length: int) -> int:
        """Return the bytes of what the layer makes for later ones besides activations. length: tokens of a row."""
        return 0

    def forward(self, inputs: Activations) -> Activations:
        given = self.context(inputs, self.attention_type, self.layer_idx)
        return self.run(self.context.tokens, self.context.batches, inputs[0], **given), *inputs[1:]

    def run(
        self,
        tokens: TokenDocuments | None,
        batches: DocumentBatches | None,
        hidden_states: torch.Tensor,
        **given: Any,
    ) -> torch.Tensor:
        """Run `transform`, a second time in the backward pass where the layer checkpoints itself. This is the function
        that is compiled: nothing in it depends on the number of the layer. tokens, batches: of the context, at this
        micro-batch. given: the keywords from the context."""
        if self.recompute is None or not torch.is_grad_enabled():
            return self.transform(hidden_states, **given)
        return self.recompute(partial(self._transform_micro_batch, tokens, batches), hidden_states, **given)

    def _transform_micro_batch(
        self,
        tokens: TokenDocuments | None,
        batches: DocumentBatches | None,
        hidden_states: torch.Tensor,
        **given: Any,
    ) -> torch.Tensor:
        """Run `transform` with the context of the given micro-batch. When this runs again, uncompiled, the context may
        be at another micro-batch; a compiled checkpoint keeps the values that it has read."""
        if torch.compiler.is_compiling():
            return self.transform(hidden_states, **given)
        context = self.context
        current = context.tokens, context.batches
        context.tokens, context.batches = tokens, batches
        try:
            return (self.transform_apart or self.transform)(hidden_states, **given)
        finally:
            context.tokens, context.batches = current

    def transform(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """Run the layer of `transformers`. given: the keywords from the context."""
        return super().forward(hidden_states, **given)

    def set_tp_heads(self, rank: int, size: int) -> None:
        """Set the number of heads after tensor parallelism has sharded the projections over `size` ranks: for families
        whose attention stores it."""


def make_buffers_of_untrained(layer: nn.Module) -> None:
    """Turn parameters without a gradient (the bias of Ernie's routers in `transformers`, 5.23) into buffers of the same
    name, which keep their own dtype."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


class PipelineNorm(nn.Module):
    """Mixin before a final norm of `transformers`, built as `norm(hidden_size, eps)`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs: Activations) -> Activations:
        return super().forward(inputs[0]), *inputs[1:]


class FinalLayerNorm(PipelineNorm, nn.LayerNorm):  # type: ignore[misc]  # the mixin's forward is the one
    """The final norm of the older families. `bias` as in `nn.LayerNorm`."""

    def __init__(self, config: PretrainedConfig, bias: bool = True) -> None:
        nn.LayerNorm.__init__(self, config.hidden_size, eps=config.layer_norm_epsilon, bias=bias)


class LMHead(nn.Linear):
    """The output projection. It makes no logits: the loss does, from its outputs."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        return hand_to_loss(self, inputs)


class BiasedLMHead(LMHead):
    """A head with a bias: the bias is one more column of its matrix, and hidden states have a one appended.

    So the loss needs no bias. Padded with zeros to a multiple of 8 columns, which tensor cores want.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        nn.Linear.__init__(self, config.hidden_size, config.vocab_size)

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        return hand_biased_to_loss(self, inputs)


def hand_to_loss(module: nn.Module, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (hidden_states [B, T, D], weight [V, D]) for the loss; with tied embeddings `module` is the embedding.

    The weight is returned as a view: DeepSpeed puts backward hooks on a stage's outputs, and on a leaf they would pile
    up with each micro-batch (seen in 0.19.8, `register_output_backward_hooks`).
    """
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return _take_for(module, inputs[0]), weight.view_as(weight)


def hand_biased_to_loss(head: nn.Linear, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same of a head with a bias, as one more column of hidden states and matrix, and zeros after it."""
    hidden_states = _take_for(head, inputs[0])
    width = -hidden_states.shape[-1] % 8 or 8
    one = nn.functional.pad(hidden_states.new_ones(*hidden_states.shape[:-1], 1), (0, width - 1))
    column = nn.functional.pad(head.bias.unsqueeze(1), (0, width - 1))
    return torch.cat([hidden_states, one], dim=-1), torch.cat([head.weight, column], dim=1)


def _take_for(head: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of all tokens, gathered where a rank has a part of them, in the dtype of the head: the
    families of `residual_in_fp32` (mamba) pass them in fp32 from layer to layer."""
    parallel, weight = getattr(head, "parallel", NO_TP), head.weight
    assert isinstance(weight, torch.Tensor)
    hidden_states = hidden_states.to(weight.dtype)
    return gather_tokens(hidden_states, parallel) if parallel.splits_sequence else hidden_states


def get_attention_type(config: PretrainedConfig, layer_idx: int) -> str:
    """Return "full_attention", "sliding_attention", ...: the config's entry for the layer, or else its one type."""
    if getattr(config, "layer_types", None):
        return config.layer_types[layer_idx]
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def build_decoder(
    config: PretrainedConfig,
    decoder_layer: type[nn.Module],
    norm: type[nn.Module],
    context: MicroBatchContext,
    *,
    embedding: type[nn.Module] = Embedding,
    head: type[nn.Module] = LMHead,
    names: Names = Names(),
) -> list[Layer]:
    """Return embedding, decoder layers, final norm and head; a tied head is the embedding used again."""
    tied = config.tie_word_embeddings
    tied_key = "embedding" if tied else None
    last = (
        Layer(names.embedding, embedding, (config,), tied_key, forward_fn=hand_to_loss)
        if tied
        else Layer(names.head, head, (config,))
    )
    return [
        Layer(names.embedding, embedding, (config,), tied_key),
        *(Layer(names.layer.format(i), decoder_layer, (config, i, context)) for i in range(config.num_hidden_layers)),
        Layer(names.norm, norm, (config,)),
        last,
    ]
