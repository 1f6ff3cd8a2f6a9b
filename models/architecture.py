"""The seam: a model is its list of layers.

An architecture is one file in `models/`, named after the Hugging Face `model_type`, with one function

    build_layers(config) -> list[Layer]

and one line in `ARCHITECTURES`. Trainer, converter and tests all look it up here by the checkpoint's own `model_type`.

What flows between the layers (B micro-batch, T sequence, D hidden, V vocabulary):

    first layer   (input_ids [B, T], position_ids [B, T])      -> (hidden_states [B, T, D], position_ids)
    each decoder  (hidden_states, position_ids)                -> (hidden_states, position_ids)
    head          (hidden_states, position_ids)                -> (hidden_states, head_weight [V, D])  for `models.loss`

Only `hidden_states` is floating, so DeepSpeed sends one gradient back across each boundary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from errors import UserError

# model_type -> module with `build_layers`. Imported on use: `transformers` modelling files are slow to import.
ARCHITECTURES: dict[str, str] = {
    "llama": "models.llama",
}


@dataclass(frozen=True)
class Layer:
    """One layer of the pipeline.

    hf_prefix: the Hugging Face name of a parameter is this prefix plus its name in `module_class(*args)`.
    tied_key: layers that share one module carry the same key; the first of them owns the weights (and their file).
    forward_fn: how a layer uses a module that it shares: `forward_fn(module, inputs)`; None means `module(inputs)`.
    """

    hf_prefix: str
    module_class: type[nn.Module]
    args: tuple[Any, ...]
    tied_key: str | None = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None

    @property
    def owns_weights(self) -> bool:
        return self.forward_fn is None

    def build_on_meta(self) -> nn.Module:
        """The module without storage: its parameter names, shapes and counts cost nothing."""
        with torch.device("meta"):
            return self.module_class(*self.args)

    def shapes(self) -> dict[str, torch.Size]:
        """Parameter name (as in the layer file) -> shape."""
        return {name: tensor.shape for name, tensor in self.build_on_meta().state_dict().items()}


def build_layers(config: PretrainedConfig) -> list[Layer]:
    """The layers of the model that `config` describes, embedding first, head last.

    Raises UserError for a `model_type` that is not in the table.
    """
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"model_type '{config.model_type}' is not supported; known: {', '.join(sorted(ARCHITECTURES))}. "
            "README.md, 'Add a model', says how"
        )
    return importlib.import_module(ARCHITECTURES[config.model_type]).build_layers(config)
