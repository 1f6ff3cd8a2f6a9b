"""Small models with all features of a config, which a proof can run in a second.

Sizes are recognized by the words that configs of `transformers` use for them. Layers: `models/generic/layer_kinds.py`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from errors import UserError
from models.experts.sizes import NUM_CHOSEN, NUM_EXPERTS
from models.generic.layer_kinds import MIN_LAYERS, choose_layers, cut_layers

_HIDDEN, _NUM_HEADS, _HEAD_DIM, _VOCAB = 64, 4, 16, 320
_NUM_POSITIONS = 256  # more than the rows of any proof have, even where the model itself has fewer
_LENGTH = 24  # of the rows of a proof: windows and chunks have to be shorter
_SCALE = 0.2  # of initial weights: scores and logits away from zero, so that every operation on them shows

# Fields that are as wide as hidden states
_WIDTHS = re.compile("hidden_size|d_model|n_embd|emb_dim|embedding_dim|dim_model|lru_width|mamba_d_ssm")
# Pattern of a field's name -> its small value, for integers above 1
_SIZES: dict[str, int] = {
    r"moe_.*intermediate_size|.*expert.*(intermediate_size|ffn_hidden_size)|shared_intermediate_size": 32,
    r"intermediate_size.*|.*_ffn_dim|ffn_(dim|hidden_size)|feed_forward_size|n_inner|d_inner|dff|dim_ff": 64,
    r".*intermediate_size": 64,
    r"sliding_window(_size)?|.*window_size|local_attention": 6,
    r"attention_chunk_size|floor_scale|log_scaling_n_floor|.*chunk_size|(index_)?block_size": 8,
    r"vocab_size.*|.*_vocab_size|n_token|n_words|unpadded_vocab_size": _VOCAB,
    r"kv_lora_rank|.*_rank|.*_lowrank": 16,
    r"q_lora_rank": 24,
    r"moe_hidden_size": 48,
    r".*state_size|.*d_state|linear_.*head_dim|mamba_(head_?dim|d_head)": _HEAD_DIM,
    r"index_topk": 5,
    r"index_n_heads": 32,  # with few, many scores are 0, and equal
    r".*index_topk_blocks": 2,
}
_EMBEDDING_SIZES = re.compile(
    "embedding_size|.*_embed_proj_dim|.*_embedding_size|.*_embed_dim|hidden_size_per_layer_input"
)
_POSITIONS = re.compile(
    "max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|model_max_length"
)
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HEAD_COUNTS = re.compile(
    r"(?!index_).*(num|n)_(.*_)?heads|((en|de)coder_)?attention_heads|n_head|.*_per_layer|num_query_groups"
)
_HEAD_SIZES = re.compile(r"(?!linear_|mamba_).*(head_dim|head_size)|rotary_dim|kv_channels|dim_head|d_head|d_kv")
_EXPERTS = (*NUM_EXPERTS, "zero_expert_num")
_CHOSEN = (*NUM_CHOSEN, "num_experts_per_token", "moe_top_k")
_TOKENS = re.compile(r".*_(token_id|index|id)")
_SCALES = re.compile(r"initializer_range|init_std|initializer_factor")
_STATE_SPACE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)
# Fields that small configs keep: none; sizes of heads; sizes and numbers of heads, on which others depend
_KEPT = (re.compile(""), _HEAD_SIZES, re.compile(".*(head|group).*"))


@dataclass(frozen=True)
class SmallSizes:
    """The least sizes of a small model that ranks divide; none exceeds that of the model which it stands for.

    num_layers: without those that it has more of to have each kind. width: hidden states and heads are so many times
    64, and 4.
    """

    num_layers: int = MIN_LAYERS
    width: int = 1
    num_experts: int = 8


def shrink(config: PretrainedConfig, sizes: SmallSizes = SmallSizes()) -> PretrainedConfig:
    """Return a small config with the features of `config`: a layer of each kind, and the same fields except for sizes.

    Some sizes depend on each other in ways that only the family knows. So several small configs are tried, and the
    first that runs is returned. Raises UserError with the reason of the first where none runs.
    """
    if not hasattr(config, "num_hidden_layers"):
        parts = [name for name, value in vars(config).items() if isinstance(value, PretrainedConfig)]
        raise UserError(f"it is several models in one ({', '.join(parts)})")
    reasons = []
    for keep in _KEPT:
        try:
            small = _shrink(config, keep, sizes)
            model, input_ids = build_small(copy.deepcopy(small))
            with torch.no_grad():
                model(input_ids, use_cache=False)
            return small
        except Exception as error:  # other people's code, on a config it was not made for
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    raise UserError(f"no small model of this config can be run ({reasons[0]})")


def restore_dropout(small: PretrainedConfig, config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a small config with the dropout rates of `config`; layer dropout becomes 1, which drops all
    layers."""
    restored = copy.deepcopy(small)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(restored, name, 1.0 if value and "layer" in name else value)
    return restored


def _shrink(config: PretrainedConfig, keep: re.Pattern[str], sizes: SmallSizes) -> PretrainedConfig:
    """Return a small config. keep: names of fields that are left as they are."""
    fields = cut_layers(config, choose_layers(config, sizes.num_layers))
    small = _fit_state_space(_Sizes(config.to_dict(), keep, sizes).shrink(fields))
    for rope in (small.get("rope_parameters"), small.get("rope_scaling")):
        if rope and (sections := rope.get("mrope_section") or _find_sections(type(config)(**small))):
            scale = _get_head_dim(small) / _get_head_dim(config.to_dict())
            rope["mrope_section"] = _shrink_sections(sections, scale)
    return type(config)(**small)


def _find_sections(small: PretrainedConfig) -> list[int] | None:
    """Return the sections of a rotary embedding, in full size, that the model takes if its config names none; None if
    it has none."""
    if "mrope_section" not in getattr(small, "ignore_keys_at_rope_validation", ()):
        return None
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(small)](small)
    found = (getattr(part, "mrope_section", None) for part in model.modules())
    return next((sections for sections in found if isinstance(sections, list)), None)


def _get_head_dim(fields: Mapping[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _shrink_sections(sections: Sequence[int], scale: float) -> list[int]:
    """Return the parts of a rotary embedding that Qwen-VL's three kinds of positions use, in their proportions: equal
    ones stay as equal as their sum allows."""
    exact = [section * scale for section in sections]
    whole = [max(1, int(size)) for size in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: whole[place] - exact[place])
    for place in by_remainder[: round(sum(exact)) - sum(whole)]:
        whole[place] += 1
    return whole


class _Sizes:
    """The small sizes of one config, some of which must keep their ratio to others."""

    def __init__(self, fields: Mapping[str, Any], keep: re.Pattern[str], least: SmallSizes) -> None:
        self._keep, self._width = keep, least.width
        counts = (fields.get(name) for name in _QUERY_HEADS)
        self._num_heads = next((count for count in counts if isinstance(count, int)), 0)
        sizes = {size for name, size in fields.items() if isinstance(size, int) and _is_head_size(name, size)}
        self._num_sizes, self._unit = len(sizes), math.gcd(*sizes)
        self._num_experts = max(least.num_experts, 4 * (fields.get("n_group") or fields.get("num_expert_group") or 1))
        groups = fields.get("topk_group") or 1
        self._num_chosen = 2 if groups == 1 else groups + 1  # so that groups leave out some that would be chosen
        self._hidden_size = fields.get("hidden_size") or _HIDDEN

    def shrink(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with small sizes. Sub-configs, and settings of single layers, are nested dicts with the
        same names."""
        return {str(name): self._shrink(str(name), value) for name, value in fields.items()}

    def _shrink(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return value if name.startswith("rope_") else self.shrink(value)
        if isinstance(value, list):
            return [self._shrink(name, entry) for entry in value]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or self._keep.fullmatch(name):
            return value
        if isinstance(value, float):
            return 0.0 if "drop" in name else _SCALE if _SCALES.fullmatch(name) else value
        if _TOKENS.fullmatch(name):
            return value if value < _VOCAB else 2
        return value if value < 2 else self._shrink_size(name, value)

    def _shrink_size(self, name: str, value: int) -> int:
        if _HEAD_COUNTS.fullmatch(name):  # as many as query heads, fewer, or more
            most = self._num_heads or value
            small = 2 if value < most else _NUM_HEADS if value == most else 2 * _NUM_HEADS
            return min(value, self._width * small)
        if _is_head_size(name, value):  # in the same ratio as before to the other sizes of heads
            return value // self._unit * (_HEAD_DIM if self._num_sizes == 1 else _HEAD_DIM // 2)
        if name == "attention_hidden_size":  # a multiple of the other one
            return value * self._width * _HIDDEN // self._hidden_size
        if _EMBEDDING_SIZES.fullmatch(name):  # one that equals the hidden size needs no projection
            return min(value, self._width * _HIDDEN if value == self._hidden_size else _HIDDEN // 2)
        if _WIDTHS.fullmatch(name):
            return min(value, self._width * _HIDDEN)
        if _POSITIONS.fullmatch(name):
            return _NUM_POSITIONS
        if name in _EXPERTS:
            return min(value, self._num_experts)
        if name in _CHOSEN:
            return min(value, self._num_chosen)
        sizes = (size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name))
        return min(value, next(sizes, value))


def _is_head_size(name: str, value: int) -> bool:
    return _HEAD_SIZES.fullmatch(name) is not None and value >= _HEAD_DIM


def _fit_state_space(fields: dict[str, Any]) -> dict[str, Any]:
    """Make the heads of a state space together as wide as the layer's expanded hidden states."""
    expand, hidden_size = fields.get("mamba_expand", fields.get("expand")), fields.get("hidden_size")
    names = [pair for pair in _STATE_SPACE_HEADS if all(isinstance(fields.get(name), int) for name in pair)]
    if not expand or not hidden_size or not names:
        return fields
    count, size = names[0]
    width = fields.get("mamba_d_ssm") or int(expand * hidden_size)
    return {**fields, count: width // _HEAD_DIM, size: _HEAD_DIM}


def build_small(config: PretrainedConfig) -> tuple[PreTrainedModel, torch.Tensor]:
    """Return the model of a small config with random weights, the same at every call, and input_ids [2, 24]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).train()
        _stir(model)
        return model, torch.randint(3, config.vocab_size, (2, _LENGTH))


@torch.no_grad()
def _stir(model: PreTrainedModel) -> None:
    """Move weights away from values that would hide a mistake: vectors of ones or zeros, and matrices so small that
    attention weighs all tokens alike."""
    for parameter in model.parameters():
        if parameter.ndim == 1 or parameter.mean().abs() > parameter.std():  # such as a table of decays
            parameter += 0.1 * torch.randn_like(parameter)
            continue
        scale = min(_SCALE, _SCALE * math.sqrt(_HIDDEN / parameter.shape[-1]))
        if parameter.std() < scale / 2:
            parameter.normal_(std=scale)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():  # such as a router's bias; others follow from the config
        if name in saved and buffer.ndim == 1 and not buffer.any():
            buffer += 0.1 * torch.randn_like(buffer)
