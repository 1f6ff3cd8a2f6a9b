"""The frozen tower of a vision-language model: on the first stage it turns the pixels of a micro-batch into vectors,
which take the place of the embeddings of the tokens that stand for them.

It is no layer: nothing of it is trained, and its tensors stay with those that a run passes through unchanged
(`models/weights/passthrough.py`). It runs once for a micro-batch, before the first layer, without gradients, so a layer
that is recomputed does not run it again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from batch import Inputs
from errors import UserError
from extensions.images.columns import PLACES
from extensions.images.families import Family, find_family
from models.generic.backbone import compute_buffers
from models.layers.decoder import Embedding
from models.layers.wrapped import Wrapper
from models.weights.source import WeightSource
from training.pipeline.module import StageModule


class ImageFront:
    """From the inputs of a micro-batch to the argument of the first layer, with an image's vectors and their places."""

    def __init__(self, tower: PreTrainedModel, family: Family, dtype: torch.dtype, width: int) -> None:
        self._tower, self._family, self._dtype, self._width = tower, family, dtype, width

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return ids, positions, segments, the vectors of all images [N, D], and their places [N] in the flattened ids
        [B x T]."""
        places = inputs.columns[PLACES]
        given = {name: inputs.columns[name] for name in self._family.inputs}
        vectors = given["pixel_values"].new_empty(0, self._width, dtype=self._dtype)
        if len(places):
            model: Any = self._tower
            found = model.get_image_features(**given, return_dict=True).pooler_output
            # One tensor for each image, or [images, vectors of each, D]
            vectors = torch.cat([each.flatten(0, -2) for each in found]).to(self._dtype)
        return inputs.input_ids, inputs.position_ids, inputs.segment_ids, vectors, places


def build_front(module: StageModule, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
    """Give the stage that has the first layer its tower. Raises UserError for a
    model without one, and for a tensor that is missing."""
    wrapper = source.wrapper
    if wrapper is None:
        raise UserError(
            f"data=image_chat: {source.path} is a '{source.config.model_type}', which reads no images; give a model "
            "that does, or data=chat"
        )
    family = find_family(wrapper.config, str(source.path))
    if not module.has_first_layer:
        return
    tower = load_tower(wrapper, source, device, dtype)
    module.front = ImageFront(tower, family, dtype, source.config.hidden_size)
    for layer in module.local_layers:
        if layer.index == 0:
            assert isinstance(layer.module, Embedding), type(layer.module)
            layer.module.takes_vectors = True


def load_tower(wrapper: Wrapper, source: WeightSource, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return the part of the whole model around its text model, frozen, with the weights of a source."""
    name = wrapper.base.removesuffix(".").rpartition(".")[0]  # of the model that has the tower and the text model
    inner: Any = wrapper.model.get_submodule(name)
    text = wrapper.base.removesuffix(".").rpartition(".")[2]
    tower: Any = object.__new__(type(inner))
    nn.Module.__init__(tower)
    vars(tower).update({key: value for key, value in vars(inner).items() if key != "_modules"})
    for key, part in inner.named_children():
        if key != text:
            tower.add_module(key, copy.deepcopy(part))
    compute_buffers(tower, ())
    stored = {wrapper.name_in_memory(info.name): info.name for info in source.list_passthrough()}
    tensors = {}
    for key in tower.state_dict():
        own = f"{name}.{key}" if name else key
        if own not in stored:
            raise UserError(f"{source.path}: tensor '{own}' of the vision tower is missing; is the download complete?")
        tensors[key] = source.read_passthrough(stored[own]).to(device=device, dtype=dtype, copy=True)
    tower.load_state_dict(tensors, assign=True)
    for part in tower.modules():
        for key, buffer in part.named_buffers(recurse=False):
            setattr(part, key, buffer.to(device))
    return tower.requires_grad_(False).eval()
