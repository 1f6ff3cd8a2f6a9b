"""Families without a file here, from the parts of the model that `transformers` has of them.

A model of embed_tokens, layers, norm and a head is taken to be those, one after the other. That does not say what else
it does: a scaled embedding, capped or scaled logits, a mask of its own kind. So before such a model is used it is
proven: a small one of the same config, random weights, run here and by `transformers`, must give the same loss and the
same gradients. What differs is refused, with the difference. Tensor parallelism follows the plan that `transformers`
publishes (`base_model_tp_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from models.layer import Layer
from models.losses.cross_entropy import IGNORE_INDEX, build_loss
from models.packed_attention import FLASH, VARLEN
from models.parallel.plan import read_published_plan

tensor_parallel_plan = read_published_plan
BOUND = 1e-5  # of a relative difference, in fp32
# A small model keeps the config's other fields. Those that it does not have are omitted.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "q_lora_rank": 24,
}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "moe_k")
_NUM_LAYERS = 4
_proven: dict[str, str | None] = {}  # a config -> why its parts alone are not the model


def build_layers(config: PretrainedConfig) -> list[Layer]:
    """Raises UserError for a family whose parts alone are not the model, with what is missing."""
    key = config.to_json_string(use_diff=False)
    if key not in _proven:
        _proven[key] = _find_fault(config)
    if _proven[key] is not None:
        raise UserError(
            f"model_type '{config.model_type}' has no file in models/, "
            f"and its embedding, layers, norm and head alone are not the model: {_proven[key]}. "
            "docs/add_a_model.md says how to write the file"
        )
    return _assemble(config)


def is_published(config: PretrainedConfig) -> bool:
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def list_attention(config: PretrainedConfig) -> tuple[str, ...]:
    """The kernels that the family's attention can use, the first by default."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kernels = ["sdpa", VARLEN] if model_class._supports_sdpa else []
    flash = FLASH if model_class._supports_flash_attn else ()
    return *kernels, "eager", *flash, *(["flex_attention"] if model_class._supports_flex_attn else [])


def passes_documents(config: PretrainedConfig) -> bool:
    """Whether the layers hand on to their attention what it needs to keep packed documents apart without a mask: a
    small model gives the same loss with it as with the mask."""
    small = shrink(config)
    position_ids = torch.cat([torch.arange(9), torch.arange(15)]).repeat(2, 1)
    losses = []
    for small._attn_implementation in (list_attention(config)[0], VARLEN):
        model, input_ids = _build_small(small)
        try:
            losses.append(_run(_assemble(small), model.state_dict(), input_ids, small, position_ids)[0])
        except (TypeError, ValueError):  # `models.packed_attention.attend` lacks its keyword, or got one it refuses
            return False
    return abs(losses[1].item() / losses[0].item() - 1) < BOUND


def _find_fault(config: PretrainedConfig) -> str | None:
    try:
        worst, name = compare_with_transformers(shrink(config))
    except UserError as error:
        return str(error)
    except Exception as error:  # other people's code, on a config it was not made for
        words = " ".join(str(error).split())[:160]
        return f"a small model of this config cannot be run by its layers alone ({type(error).__name__}: {words})"
    if worst < BOUND:
        return None
    return (
        f"it does something else beside, since '{name}' of a small model differs by {worst:.0e} "
        "from that of transformers"
    )


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A small config with the features of `config`: a layer of each kind, and the same fields but for sizes."""
    kinds = getattr(config, "layer_types", None) or []
    chosen = sorted({kinds.index(kind) for kind in kinds} | set(range(min(_NUM_LAYERS, config.num_hidden_layers))))
    fields = config.to_dict()
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            fields[name] = [value[index] for index in chosen]
    sizes = {name: value for name, value in _SMALL.items() if fields.get(name) is not None} | _shrink_experts(fields)
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        sizes.pop("num_key_value_heads", None)
        fields["num_key_value_heads"] = sizes.get("num_attention_heads")
    return type(config)(**{**fields, **sizes, "num_hidden_layers": len(chosen)})


def _shrink_experts(fields: Mapping[str, Any]) -> dict[str, int]:
    """Few experts, in as many groups as before."""
    num_experts = max(8, 4 * (fields.get("n_group") or 1))
    most = {**dict.fromkeys(_NUM_EXPERTS, num_experts), **dict.fromkeys(_NUM_CHOSEN, 2)}
    return {name: min(fields[name], limit) for name, limit in most.items() if fields.get(name)}


def _assemble(config: PretrainedConfig) -> list[Layer]:
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


def compare_with_transformers(config: PretrainedConfig) -> tuple[float, str]:
    """The largest relative difference of loss and gradients, and of which tensor. Runs both models; for small ones."""
    config._attn_implementation = list_attention(config)[0]
    layers = _assemble(config)
    model, input_ids = _build_small(config)
    with torch.random.fork_rng(devices=[]):  # a router may draw
        torch.manual_seed(0)
        expected = model(input_ids, labels=input_ids, use_cache=False).loss
        torch.manual_seed(0)
        loss, modules = _run(layers, model.state_dict(), input_ids, config)
    expected.backward()
    loss.backward()
    pairs = {"loss": (loss, expected)}
    named = dict(model.named_parameters())
    for layer, module in modules:
        pairs |= {
            layer.hf_prefix + name: (p.grad, named[layer.hf_prefix + name].grad)
            for name, p in module.named_parameters()
            if p.requires_grad
        }
    named = {name: p for name, p in named.items() if p.requires_grad}
    if missing := named.keys() - pairs.keys():
        raise UserError(f"it has parameters outside of these parts ('{min(missing)}')")
    return max(
        (((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item(), name)
        for name, (ours, theirs) in pairs.items()
    )


def _build_small(config: PretrainedConfig) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model of a small config with random weights, the same at every call, and input_ids [2, 24]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model, torch.randint(3, config.vocab_size, (2, 24))


def _run(
    layers: list[Layer],
    weights: dict[str, torch.Tensor],
    input_ids: torch.Tensor,
    config: PretrainedConfig,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[tuple[Layer, nn.Module]]]:
    """The loss of the layers one after the other, and those that own weights with their modules. position_ids: one
    document a row by default."""
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1)
    activations: Any = (input_ids, position_ids, torch.ones_like(input_ids, dtype=torch.int32))
    modules: list[tuple[Layer, nn.Module]] = []
    shared: dict[str, nn.Module] = {}
    for layer in layers:
        if not layer.owns_weights:
            activations = layer.forward_fn(shared[layer.tied_key], activations)
            continue
        with torch.random.fork_rng(devices=[]):  # what initialisation draws would be missing in the pass
            module = layer.module_class(*layer.args)
        module.load_state_dict({name: weights[layer.hf_prefix + name] for name in module.state_dict()})
        modules.append((layer, module))
        if layer.tied_key:
            shared[layer.tied_key] = module
        activations = module(activations)
    targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    count = torch.tensor(float(input_ids[:, 1:].numel()))
    return build_loss(config)(activations, (targets, count)), modules
