"""Proves that a wrapped model does with text what its text model does alone: a small one must give the same loss and
gradients. A wrapper could scale its logits, or have a mask of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from errors import UserError
from models.experts.grouped import GROUPED
from models.generic.proof import BOUND, compare
from models.generic.shrink import build_small, shrink
from models.layers.layer import Layer
from models.layers.wrapped import Wrapper

BuildLayers = Callable[[PretrainedConfig], list[Layer]]

_proven: dict[str, str | None] = {}  # a wrapped config -> what is wrong with it


def prove(config: PretrainedConfig, wrapper: Wrapper, build_layers: BuildLayers) -> None:
    """Check that the model around the text model `config` computes the same for text. Raises UserError where it does
    not.

    build_layers: of the text model's family.
    """
    key = wrapper.config.to_json_string(use_diff=False)
    if key not in _proven:
        _proven[key] = _find_fault(config, wrapper, build_layers)
    if _proven[key] is not None:
        raise UserError(
            f"a '{wrapper.config.model_type}' cannot be trained as its '{config.model_type}' alone: {_proven[key]}. "
            "docs/models.md says what a wrapped model has to be"
        )


def _find_fault(config: PretrainedConfig, wrapper: Wrapper, build_layers: BuildLayers) -> str | None:
    try:
        small = shrink(config)
        small._attn_implementation = "eager" if config._attn_implementation == "eager" else "sdpa"
        worst, name = compare_with_wrapped(small, wrapper, build_layers)
    except UserError as error:
        return str(error)
    except Exception as error:  # other people's code, on a config it was not made for
        words = " ".join(str(error).split())[:160]
        return f"a small one cannot be run on text ({type(error).__name__}: {words})"
    if worst < BOUND:
        return None
    return f"given text, '{name}' of a small {wrapper.name} differs by {worst:.0e} from that of its text model"


def compare_with_wrapped(small: PretrainedConfig, wrapper: Wrapper, build_layers: BuildLayers) -> tuple[float, str]:
    """Return the largest relative difference of loss and gradients, and the name of that tensor: a small text model's
    layers against the wrapped class around it, given text alone."""
    small._experts_implementation = GROUPED
    layers = wrapper.rename(build_layers(small))
    plain = copy.deepcopy(small)
    plain._experts_implementation = "eager"
    text, input_ids = build_small(plain)
    return compare(layers, _wrap(text, wrapper), input_ids, small)


def _wrap(text: PreTrainedModel, wrapper: Wrapper) -> PreTrainedModel:
    """Return the wrapped class around `text`. Its other parts stay on the meta device: text does not reach them."""
    config = copy.deepcopy(wrapper.config)
    config.text_config = text.config
    with torch.device("meta"):
        model = type(wrapper.model)(config).train()
    name = wrapper.base.removesuffix(".")
    while name:  # a model reports the device of its first parameter as its own
        name = name.rpartition(".")[0]
        model.get_submodule(name).register_parameter("on_cpu", nn.Parameter(torch.zeros(()), requires_grad=False))
    model.set_submodule(wrapper.base.removesuffix("."), text.get_submodule(wrapper.own_base.removesuffix(".")))
    model.set_submodule(wrapper.head.removesuffix("."), text.get_output_embeddings())
    add_image_outputs(model)
    return model


def add_image_outputs(model: PreTrainedModel) -> None:
    """Give the outputs of the text model in a Llama 4 the field `image_outputs`: in `transformers` 5.24.0 every forward
    pass of Llama 4 with images reads it there, and ends in an AttributeError. Does nothing to other models."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.get_submodule("language_model").register_forward_hook(_add_image_outputs)


def _add_image_outputs(_module: nn.Module, _inputs: Any, outputs: ModelOutput) -> None:
    if not hasattr(outputs, "image_outputs"):
        outputs.image_outputs = None
