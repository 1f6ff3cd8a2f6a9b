"""The families whose layers for further tokens are known, and the model's layers with them.

A naming scheme is one module here with `build_layers`, `COPIES`, `MOST_DEPTHS` and `UNSTATED_DEPTHS`; a family is one
line in `SCHEMES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from transformers import PretrainedConfig

from errors import UserError
from models.further.layers import ShiftedEmbeddings
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer

# The keys of config.json that count the layers that predict further tokens.
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")
# In config.json next to a checkpoint: how many of them are layers of the model; without it they are passed through.
TRAINED = "trained_further_layers"
_EMBEDDING_KEY = "embedding"

# model_type -> the scheme of its names
SCHEMES: Mapping[str, str] = {
    "deepseek_v3": "models.further.numbered",
    "glm4_moe": "models.further.numbered",
    "qwen3_next": "models.further.prefixed",
}


def count_published(config: PretrainedConfig) -> int:
    """Return the number of further layers that config.json states; 0 where it states none."""
    return max(_list_stated(config), default=0)


def _list_stated(config: PretrainedConfig) -> list[int]:
    stated = (getattr(config, key, None) for key in FURTHER_LAYERS)
    return [int(count) for count in stated if count is not None]


def count_trained(config: PretrainedConfig) -> int:
    """Return how many further layers are layers of the model that `config` describes."""
    return int(getattr(config, TRAINED, 0) or 0)


def set_trained(config: PretrainedConfig, trains: bool) -> None:
    """Make the further layers of a model layers of it, or not. Raises UserError for a model without them, or one whose
    layers are not known."""
    if not trains:
        if hasattr(config, TRAINED):
            delattr(config, TRAINED)
        return
    if config.model_type not in SCHEMES:
        raise UserError(
            f"mtp.loss_coef: what the further layers of a '{config.model_type}' compute is not known here, only those "
            f"of {', '.join(sorted(SCHEMES))}; give mtp.loss_coef=0, which passes them through"
        )
    scheme = _load_scheme(config)
    count = max(_list_stated(config), default=scheme.UNSTATED_DEPTHS)
    if count == 0:
        raise UserError(
            f"mtp.loss_coef: config.json of this '{config.model_type}' counts no layers that predict further tokens "
            f"({' or '.join(FURTHER_LAYERS)}); give mtp.loss_coef=0, or state their number there"
        )
    most = scheme.MOST_DEPTHS
    if most is not None and count > most:
        raise UserError(
            f"mtp.loss_coef: a '{config.model_type}' with {count} layers that predict further tokens is not supported, "
            f"at most {most}; give mtp.loss_coef=0"
        )
    setattr(config, TRAINED, count)


def add_further_layers(config: PretrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with those of the trained depths before the head, and a use of the embedding before them; the
    same layers where there are none."""
    num_depths = count_trained(config)
    if num_depths == 0:
        return list(layers)
    *body, norm, head = layers
    decoder = [layer for layer in body if issubclass(layer.module_class, PipelineDecoderLayer)]
    first = replace(body[0], tied_key=_EMBEDDING_KEY)
    context = decoder[-1].args[2]
    lookup = replace(first, forward_fn=ShiftedEmbeddings(num_depths, context), is_further=True)
    further = _load_scheme(config).build_layers(config, decoder, norm, num_depths)
    return [first, *body[1:], norm, lookup, *further, replace(head, num_blocks=1 + num_depths)]


def count_tail(layers: Sequence[Layer]) -> int:
    """Return how many of the last layers have to be in one chunk: the head, and what predicts further tokens."""
    return 1 + sum(layer.is_further for layer in layers)


def list_copies(config: PretrainedConfig, layers: Sequence[Layer]) -> dict[str, int]:
    """Return the published copies of embedding and head in the further layers: name -> index of the layer whose
    `weight` it is."""
    if count_trained(config) == 0:
        return {}
    head = len(layers) - 1 if layers[-1].owns_weights else 0
    return {
        layer.hf_prefix + name: head if is_head else 0
        for layer in layers
        if layer.is_further and layer.owns_weights
        for name, is_head in _load_scheme(config).COPIES.items()
    }


def _load_scheme(config: PretrainedConfig) -> ModuleType:
    return importlib.import_module(SCHEMES[config.model_type])
