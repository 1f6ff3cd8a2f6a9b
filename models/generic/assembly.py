"""The layers of a family without a file: embedding, decoder layers, final norm and head, as `transformers` has them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from errors import UserError
from models.context import MicroBatchContext
from models.decoder import (
    BiasedLMHead,
    FinalLayerNorm,
    LMHead,
    Names,
    PipelineDecoderLayer,
    PipelineNorm,
    build_decoder,
)
from models.generic.shrink import shrink
from models.layer import Layer


def assemble(config: PretrainedConfig) -> list[Layer]:
    """The layers. Raises UserError for a part that the shared ones cannot stand for."""
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](shrink(config))
    base, head = model.base_model, model.get_output_embeddings()
    parts = {name for name, part in base.named_children() if next(part.parameters(), None) is not None}
    if parts | {"norm"} != {"embed_tokens", "layers", "norm"} or not hasattr(base, "norm"):
        raise UserError(f"it has other parts than embed_tokens, layers and norm ({', '.join(sorted(parts))})")
    if type(base.embed_tokens) is not nn.Embedding:
        raise UserError(f"its embedding is a {type(base.embed_tokens).__name__}")
    if type(head) is not nn.Linear or (head.bias is not None and config.tie_word_embeddings):
        raise UserError("its head is not a matrix, with or without a bias, or the embedding alone")
    if len({type(layer) for layer in base.layers}) != 1:
        raise UserError("its layers are of several classes")
    if not hasattr(base, "rotary_emb"):
        raise UserError("it has no rotary_emb for its positions")
    prefix = f"{model.base_model_prefix}."
    names = Names(f"{prefix}embed_tokens.", prefix + "layers.{}.", f"{prefix}norm.", f"{_name_of(model, head)}.")
    decoder_layer = type("DecoderLayer", (PipelineDecoderLayer, type(base.layers[0])), {})
    context = MicroBatchContext(config, type(base.rotary_emb)(config=config))
    lm_head = LMHead if head.bias is None else BiasedLMHead
    return build_decoder(config, decoder_layer, _find_norm(base.norm, config), context, head=lm_head, names=names)


def _find_norm(norm: nn.Module, config: PretrainedConfig) -> type[nn.Module]:
    if type(norm) is nn.LayerNorm and getattr(config, "layer_norm_epsilon", None) == norm.eps:
        return FinalLayerNorm
    if getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) != getattr(config, "rms_norm_eps", 0):
        raise UserError(f"its final norm is a {type(norm).__name__} whose epsilon is not rms_norm_eps")
    return type("FinalNorm", (PipelineNorm, type(norm)), {})


def _name_of(model: PreTrainedModel, module: nn.Module) -> str:
    return next(name for name, child in model.named_modules() if child is module)
