"""Checks the sizes that config.json names, before anything is built from them: against what a size can be, and against
the tensors in the files next to it. Building a model of a wrong size could take hours, or all memory.

These are bounds alone: that each tensor has the shape that the config makes it is checked when layers are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from errors import UserError

# Fields of text models by the names that transformers gives them, and the least value of each.
SIZES = {
    "hidden_size": 1,
    "vocab_size": 1,
    "head_dim": 1,
    "intermediate_size": 0,
    "moe_intermediate_size": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "v_head_dim": 1,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "kv_lora_rank": 1,
}
POSITIONS = "max_position_embeddings"
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
DROPOUTS = ("attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")
LAYERS = "num_hidden_layers"
PACKED = 8  # numbers that a stored one may stand for: of 4 bits in an int32


def check_least(config: PretrainedConfig, file: Path) -> None:
    """Raise UserError for a number that no model can have: a size below the least possible one, key-value heads that do
    not divide the heads, an epsilon, a dropout or a base of angles out of its range. file: config.json, for
    messages."""
    for name, least in {LAYERS: 1, POSITIONS: 1, **SIZES}.items():
        if (value := _read_size(config, name)) is not None and value < least:
            raise UserError(f"{file}: {name} is {value}, and must be {least} or more; fetch the file again")
    heads, shared = (_read_size(config, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if heads is not None and shared is not None and heads % shared:
        raise UserError(f"{file}: num_key_value_heads is {shared}, and must divide {heads}, num_attention_heads")
    numbers = [
        *((name, getattr(config, name, None), lambda x: 0 <= x < math.inf, "0 or more") for name in EPSILONS),
        *((name, getattr(config, name, None), lambda x: 0 <= x <= 1, "from 0 to 1") for name in DROPOUTS),
        *((name, base, lambda x: 0 < x < math.inf, "above 0") for name, base in _find_bases(config)),
    ]
    for name, number, is_valid, wanted in numbers:
        if isinstance(number, int | float) and not is_valid(number):
            raise UserError(f"{file}: {name} is {number}, and must be {wanted}; fetch the file again")


def _find_bases(config: PretrainedConfig) -> Iterator[tuple[str, object]]:
    """Yield name and value of the bases of rotary angles: of all layers, or of each kind of layers."""
    parameters = getattr(config, "rope_parameters", None)
    for part in (parameters, *parameters.values()) if isinstance(parameters, dict) else ():
        if isinstance(part, dict) and "rope_theta" in part:
            yield "rope_theta", part["rope_theta"]


def check_stored(config: PretrainedConfig, file: Path, shapes: Collection[torch.Size]) -> None:
    """Raise UserError for a size that no tensor in the files could have, and for more layers than there are tensors.
    shapes: of all tensors; none where they are not known."""
    if not shapes:
        return
    largest = PACKED * max(shape.numel() for shape in shapes)
    bounds = {
        LAYERS: (len(shapes), "tensors"),
        **dict.fromkeys(SIZES, (largest, "numbers that the largest tensor holds")),
    }
    for name, (bound, what) in bounds.items():
        if (value := _read_size(config, name)) is not None and value > bound:
            raise UserError(
                f"{file}: {name} is {value}, more than the {bound:,} {what} in the files next to it; the weights are "
                "of another model, or the file is damaged"
            )


def find_rope_types(parameters: object) -> Iterator[object]:
    """Yield the types in a config's `rope_parameters`: of all layers, or of each kind of layers."""
    if isinstance(parameters, dict):
        yield from (parameters[name] for name in ("rope_type", "type") if name in parameters)
        yield from (found for part in parameters.values() for found in find_rope_types(part))


def _read_size(config: PretrainedConfig, name: str) -> int | None:
    """Return a size; None where a model has none, or one for each layer."""
    if config.is_heterogeneous and name != LAYERS:
        return None
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None
