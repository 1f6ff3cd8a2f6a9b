"""Looks up architectures: a model is its list of layers.

An architecture is one file in `models/families/`, named after the Hugging Face `model_type`, with one function

    build_layers(config) -> list[Layer]

and one line in `ARCHITECTURES`; a `model_type` without one goes through `models/generic/`. Trainer, converter and tests
all look it up here by the checkpoint's own `model_type`. Where its family differs from most, a file may also define:

    ATTENTION_IMPLEMENTATIONS        the kernels it can use, the default first; otherwise all of transformers'
    LEARNED_POSITIONS = True         no sample can be longer than the table of positions
    SEQUENCE_OBSTACLE = "..."        why ranks cannot split its sequences
    RING_ATTENTION = True            its attention is queries, keys and values under a causal mask or a window, no more:
                                     keys and values can be passed around the ranks that split its sequences
    tensor_parallel_plan(config)     how tensor parallelism shards a decoder layer: the name of a part -> its Style, or
                                     Fused; without it the layer cannot be sharded

What flows between the layers (B micro-batch, T sequence, D hidden, V vocabulary):

    first layer   (input_ids [B, T], *integers)       -> (hidden_states [B, T, D], *integers)
    each decoder  (hidden_states, *integers)          -> (hidden_states, *integers)
    head          (hidden_states, *integers)          -> (hidden_states, head_weight [V, D])

    integers      position_ids int64 [B, T]: from 0 in each document
                  segment_ids int32 [B, T]: 0 for padding, the documents of a row from 1
                  input_ids int64 [B, T]: only up to layers that predict further tokens (`models/further/`)

A layer that is joined to the one before it (`Layer.is_joined`) may take more from that one.

Only `hidden_states` is floating, so DeepSpeed sends one gradient back across each boundary. Masks, angles and whatever
else follows from the integers: `models/layers/context.py`. The loss takes the head's outputs:
`models/losses/cross_entropy.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from errors import UserError
from models.architecture.disk_names import name_pieces, name_wrapped_pieces
from models.architecture.fp32 import mark_fp32
from models.experts.grouped import GROUPED
from models.experts.sizes import count_experts
from models.further.table import add_further_layers
from models.heads.table import put_head
from models.layers.layer import Layer, Styles, explain_config, refuse_sharding
from models.layers.packed_attention import FLASH, VARLEN, find_obstacle
from models.layers.rope_scaling import DYNAMIC, depends_on_length, find_length_limit, stretch_positions
from models.layers.wrapped import Wrapper

# model_type -> module with `build_layers`. Imported on use: `transformers` modelling files are slow to import.
ARCHITECTURES: dict[str, str] = {
    "deepseek_v3": "models.families.deepseek_v3",
    "deepseek_v32": "models.families.deepseek_v32",
    "gemma2": "models.families.gemma2",
    "glm_moe_dsa": "models.families.glm_moe_dsa",
    "gpt2": "models.families.gpt2",
    "gpt_oss": "models.families.gpt_oss",
    "llama": "models.families.llama",
    "llama4_text": "models.families.llama4_text",
    "mistral": "models.families.mistral",
    "mpt": "models.families.mpt",
    "olmo2": "models.families.olmo2",
    "phi3": "models.families.phi3",
    "qwen2": "models.families.qwen2",
    "qwen3": "models.families.qwen3",
}
# model_type -> the release of transformers that has it first, of those that train with it
LATER_RELEASES = dict.fromkeys(("apertus1p5", "apertus1p5_text", "exaone", "sarvam_mla"), "5.24.0")
# model_type of published folders that transformers does not know -> the one whose code theirs is
SAME_CODE = {"kimi_k2": "deepseek_v3"}
_ATTENTION_IMPLEMENTATIONS = ("sdpa", VARLEN, "eager", *FLASH, "flex_attention")


def build_layers(config: PretrainedConfig, wrapper: Wrapper | None = None) -> list[Layer]:
    """Return the layers of the model that `config` describes, embedding first, head last.

    wrapper: the model that contains this text model; the names of the tensors are then that model's. A classifier or a
    reward model has another head (`models/heads/`). Raises UserError for a `model_type` that is neither in the table
    nor published, for a feature that its layers do not support, and for a wrapper that does something else with text.
    """
    if count_experts(config) != (1, 1) and config._experts_implementation is None:
        config._experts_implementation = GROUPED
    with explain_config(f"a '{config.model_type}'"):
        layers = _load_architecture(config).build_layers(config)
    if wrapper is None:
        return mark_fp32(config, put_head(config, name_pieces(config, add_further_layers(config, layers))))
    proof = importlib.import_module("models.generic.wrapped_proof")
    proof.prove(config, wrapper, _load_architecture(config).build_layers)
    return mark_fp32(config, name_wrapped_pieces(config, layers, wrapper))


def remove_undeclared(config: PretrainedConfig, given: Collection[str], kept: Collection[str]) -> None:
    """Remove fields of config.json that the model ignores, since its family's class does not declare them; does nothing
    for families without a file, whose config is proven as it is. given, kept: the names in config.json, and those that
    this project reads. Raises UserError for a field that the model of `transformers` obeys."""
    if config.model_type in ARCHITECTURES:
        family, undeclared = _load_architecture(config), importlib.import_module("models.generic.undeclared")
        undeclared.remove_undeclared(config, given, kept, family.build_layers, _list_attention(config))


def choose_attention(
    config: PretrainedConfig, requested: str, gpu_dtype: torch.dtype | None = None, planned_flash: bool | None = None
) -> str:
    """Return the attention implementation for `attn_implementation=requested`. `auto` means the family's first; on a
    GPU it means torch's kernel for packed rows where that can be used, since it leaves other rows to SDPA.

    gpu_dtype: of a model on a GPU; None on a CPU. planned_flash: whether a GPU that is planned for runs flash
    attention; None asks that of this process. Raises UserError for a kernel that the family cannot use.
    """
    available = _list_attention(config)
    if requested == "auto":
        packs = (
            gpu_dtype is not None and VARLEN in available and find_obstacle(config, gpu_dtype, planned_flash) is None
        )
        return VARLEN if packs and _passes_documents(config) else available[0]
    if requested not in available:
        raise UserError(
            f"attn_implementation={requested} cannot be used with '{config.model_type}'; it has {', '.join(available)}"
        )
    obstacle = None
    if requested == VARLEN and gpu_dtype is not None:
        obstacle = find_obstacle(config, gpu_dtype, planned_flash)
    if obstacle is None and requested in (VARLEN, *FLASH) and not _passes_documents(config):
        obstacle = f"the layers of '{config.model_type}' do not pass to their attention where documents begin"
    if obstacle is not None:
        raise UserError(f"attn_implementation={requested} cannot be used here: {obstacle}; use sdpa")
    return requested


def _list_attention(config: PretrainedConfig) -> tuple[str, ...]:
    family = _load_architecture(config)
    if hasattr(family, "list_attention"):
        return family.list_attention(config)
    return getattr(family, "ATTENTION_IMPLEMENTATIONS", _ATTENTION_IMPLEMENTATIONS)


def _passes_documents(config: PretrainedConfig) -> bool:
    """Return whether the layers pass documents on to their attention; True for families with a file here, as the tests
    prove."""
    passes_documents = getattr(_load_architecture(config), "passes_documents", None)
    return passes_documents is None or passes_documents(config)


def choose_experts(
    config: PretrainedConfig, tensor_parallel_size: int, dtype: torch.dtype, expert_parallel_size: int = 1
) -> str | None:
    """Return the implementation of a rank's part of the experts: the config's, except ours where ranks divide the
    experts, and one expert after the other where that is transformers' `grouped_mm` and the bytes of a row are not a
    multiple of 16, which torch's grouped product needs (2.13; ours does not). None for a dense model."""
    if expert_parallel_size > 1:
        return GROUPED
    chosen: str | None = config._experts_implementation
    if chosen is None and count_experts(config) != (1, 1):
        chosen = GROUPED
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 0
    widths = (config.hidden_size, inner // tensor_parallel_size)
    return "eager" if chosen == "grouped_mm" and any(width * dtype.itemsize % 16 for width in widths) else chosen


def check_length(config: PretrainedConfig, max_seq_length: int) -> None:
    """Check that samples fit the model's table of positions, and that their angles do not depend on what else is in a
    micro-batch. Raises UserError for longer ones."""
    family = _load_architecture(config)
    if hasattr(family, "count_positions"):
        known = family.count_positions(config)
    else:
        known = config.max_position_embeddings if getattr(family, "LEARNED_POSITIONS", False) else None
    if known is not None and max_seq_length > known:
        raise UserError(
            f"max_seq_length={max_seq_length}, but this '{config.model_type}' has a table of {known} positions; "
            f"give at most max_seq_length={known}"
        )
    if config.model_type in ARCHITECTURES or not depends_on_length(config):
        return
    limit, _ = find_length_limit(config)
    if max_seq_length > limit:
        raise UserError(
            f"max_seq_length={max_seq_length}: the rotary positions of this '{config.model_type}' change with the "
            f"longest row of a batch beyond {limit} tokens, so a sample's loss would depend on the others; give at "
            f"most max_seq_length={limit}"
        )


def apply_rope_overrides(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """Apply a run's `rope_parameters` to the config. Raises UserError for values that do not apply to the model."""
    stretch_positions(config, given)
    if given and given["rope_type"] == DYNAMIC and config.model_type not in ARCHITECTURES:
        raise UserError(
            f"rope_parameters.rope_type={DYNAMIC}: the layers of '{config.model_type}' come from transformers, whose "
            "angles then depend on the batches before; give rope_type=yarn"
        )


def check_packing(config: PretrainedConfig) -> None:
    """Check that documents of a packed row do not see each other. Raises UserError otherwise. Families with a file here
    keep them apart, as the tests prove; for others a small model is run."""
    find_leak = getattr(_load_architecture(config), "find_leak", None)
    if find_leak is not None and (leak := find_leak(config)) is not None:
        raise UserError(
            f"data.packing=true: the documents of a row would see each other in a '{config.model_type}': {leak}; "
            "give data.packing=false (data=pretrain always packs)"
        )


def warn_of_length(config: PretrainedConfig, max_seq_length: int) -> str:
    """Return a warning about samples longer than the model was made for, where `check_length` accepts them: rotary
    angles continue silently. Empty where no warning is due."""
    known = getattr(config, "max_position_embeddings", None)
    if known is None or max_seq_length <= known:
        return ""
    return (
        f"max_seq_length={max_seq_length} is more than the {known:,} positions that the model is made for "
        "(max_position_embeddings)"
    )


def get_tensor_parallel_plan(config: PretrainedConfig) -> Styles:
    """Return how tensor parallelism shards a decoder layer. Raises UserError with the reason for a family that cannot
    be sharded."""
    family = _load_architecture(config)
    plan = getattr(family, "tensor_parallel_plan", None)
    if plan is None:
        raise refuse_sharding(config, "its file in models/ has no plan for it")
    return plan(config)


def find_sequence_obstacle(config: PretrainedConfig) -> str | None:
    """Return why context parallelism cannot split this family's sequences; None where the tests prove that it can."""
    if config.model_type not in ARCHITECTURES:
        return "it has no file in models/, and its layers were not tried on parts of sequences"
    return getattr(_load_architecture(config), "SEQUENCE_OBSTACLE", None)


def has_ring_attention(config: PretrainedConfig) -> bool:
    """Return whether this family's file in models/ allows ring attention."""
    return config.model_type in ARCHITECTURES and getattr(_load_architecture(config), "RING_ATTENTION", False)


def _load_architecture(config: PretrainedConfig) -> ModuleType:
    if config.model_type in ARCHITECTURES:
        return importlib.import_module(ARCHITECTURES[config.model_type])
    if not is_supported(config):
        raise UserError(unsupported(config.model_type))
    return importlib.import_module("models.generic.family")


def is_supported(config: PretrainedConfig) -> bool:
    """Return whether a model of this config can be trained: by a file here or by the generic route."""
    return config.model_type in ARCHITECTURES or importlib.import_module("models.generic.family").is_published(config)


def unsupported(model_type: str | None, within: str = "") -> str:
    """Return the message for a `model_type` that is not supported. within: what wraps it, in words."""
    if (release := LATER_RELEASES.get(model_type or "")) and model_type not in CONFIG_MAPPING:
        return (
            f"model_type {model_type!r}{within} needs transformers {release} or newer, and "
            f"{transformers.__version__} is installed"
        )
    return (
        f"model_type {model_type!r}{within} is not supported; known: {', '.join(sorted(ARCHITECTURES))}, "
        "and causal language models of transformers. docs/add_a_model.md says how to add one"
    )
