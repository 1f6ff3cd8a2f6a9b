"""Chooses which layers of a config a small model needs, to have one of each kind.

Configs state the kind of a layer in lists with an entry for each layer, in lists of layers, in dicts by layer, in the
number of the first layer of a kind, or in periods.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PretrainedConfig

MIN_LAYERS, _MOST = 4, 8  # at least, and where layers of a kind come in periods
_PERIODS = re.compile(r".*(_period|_interval|_step|_every_n_layers|_pattern|group_size)")
_OFFSETS = re.compile(r".*_layer_offset")
# Layers before this one are of one kind, the others of another
_THRESHOLDS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
_LAST = ("moe_layer_end_index",)  # the same, of the last one before
_FROM_END = ("num_kv_shared_layers",)  # and of the number of layers at the end
_NUMBERS = re.compile(
    r"(num_|n_)(hidden_|decoder_|encoder_)?layers?|(en|de)coder_layers|num_blocks|num_layers_per_stack"
)


def choose_layers(config: PretrainedConfig, least: int = MIN_LAYERS) -> list[int]:
    """Return the indices of the layers that a small model needs, in ascending order. least: their number, where the
    model has as many."""
    number, fields = config.num_hidden_layers, config.to_dict()
    kinds = [[_describe(name, value, index, number) for name, value in fields.items()] for index in range(number)]
    first = {kinds.index(kind) for kind in kinds}
    periods = [
        value
        for name, value in fields.items()
        if isinstance(value, int) and _PERIODS.fullmatch(name) and value <= _MOST
    ]
    return sorted(first | set(range(min(number, max([least, *periods])))))


def _describe(name: str, value: Any, index: int, number: int) -> Any:
    """Return a field's value for one layer; None if it has none."""
    if _has_entry_per_layer(value, number):
        return value[index]
    if _lists_layers(name, value, number):
        return index in value
    if _is_keyed_by_layer(value):
        return {int(key): fields for key, fields in value.items()}.get(index)
    if isinstance(value, int) and not isinstance(value, bool):
        if name in _THRESHOLDS:
            return index < value
        if name in _LAST:
            return index <= value
        if name in _FROM_END:
            return index >= number - value
    return None


def cut_layers(config: PretrainedConfig, chosen: list[int]) -> dict[str, Any]:
    """Return the fields of `config` for the chosen layers alone."""
    number = config.num_hidden_layers
    return {name: _cut(name, value, chosen, number) for name, value in config.to_dict().items()}


def _cut(name: str, value: Any, chosen: list[int], number: int) -> Any:
    if _has_entry_per_layer(value, number):
        return [value[index] for index in chosen]
    if _lists_layers(name, value, number):
        return [place for place, index in enumerate(chosen) if index in value]
    if _is_keyed_by_layer(value):
        width, by_layer = len(next(iter(value))), {int(key): fields for key, fields in value.items()}
        return {f"{place:0{width}}": by_layer[index] for place, index in enumerate(chosen) if index in by_layer}
    if name == "attention_types":  # of gpt_neo: kinds that repeat, and how often
        return [[kinds, -(-len(chosen) // len(kinds))] for kinds, _ in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _THRESHOLDS:
        return sum(index < value for index in chosen)
    if name in _LAST:
        return sum(index <= value for index in chosen) - 1
    if name in _FROM_END:
        return sum(index >= number - value for index in chosen)
    return len(chosen) if _NUMBERS.fullmatch(name) and value else value


def _has_entry_per_layer(value: Any, number: int) -> bool:
    return isinstance(value, list) and len(value) == number and value != list(range(number))


def _lists_layers(name: str, value: Any, number: int) -> bool:
    if not isinstance(value, list) or not re.search("layer|idx|ids", name) or _has_entry_per_layer(value, number):
        return False
    return all(isinstance(index, int) and index < number for index in value) and len(set(value)) == len(value)


def _is_keyed_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) and key.isdecimal() for key in value)
