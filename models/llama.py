"""Llama 1 to 3.x: rotary positions with every rope scaling of `transformers`, grouped-query attention, tied or untied head."""

from __future__ import annotations

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from models.architecture import Layer
from models.decoder import DecoderContext, Embedding, LMHead, PipelineDecoderLayer, PipelineNorm, hand_to_loss


class DecoderLayer(PipelineDecoderLayer, LlamaDecoderLayer):
    pass


class FinalNorm(PipelineNorm, LlamaRMSNorm):
    pass


def build_layers(config: LlamaConfig) -> list[Layer]:
    """Embedding, decoder layers, final norm, head; a tied head is the embedding used again."""
    context = DecoderContext(config, LlamaRotaryEmbedding(config))
    tied = config.tie_word_embeddings
    tied_key = "embed_tokens" if tied else None
    head = (
        Layer("model.embed_tokens.", Embedding, (config,), tied_key, forward_fn=hand_to_loss)
        if tied
        else Layer("lm_head.", LMHead, (config,))
    )
    return [
        Layer("model.embed_tokens.", Embedding, (config,), tied_key),
        *(Layer(f"model.layers.{i}.", DecoderLayer, (config, i, context)) for i in range(config.num_hidden_layers)),
        Layer("model.norm.", FinalNorm, (config.hidden_size, config.rms_norm_eps)),
        head,
    ]
