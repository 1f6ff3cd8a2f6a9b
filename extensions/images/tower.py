"""The frozen tower of a vision-language model: on the first stage it turns the pixels of a micro-batch into vectors,
which take the place of the embeddings of the tokens that stand for them.

It is no layer: nothing of it is trained, and its tensors stay with those that a run passes through unchanged
(`models/weights/passthrough.py`). It runs once for a micro-batch, before the first layer, without gradients, so a layer
that is recomputed does not run it again.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from batch import Inputs
from errors import UserError
from extensions.images.columns import SPATIAL_IDS, VECTOR_PLACES
from extensions.images.families import Family, find_family
from models.generic.backbone import compute_buffers
from models.generic.parts import BackboneContext
from models.layers.decoder import PipelineDecoderLayer
from models.layers.wrapped import Wrapper
from models.weights.source import WeightSource
from training.pipeline.module import StageModule


class ImageFront:
    """From the inputs of a micro-batch to the argument of the first layer."""

    def __init__(self, tower: PreTrainedModel, family: Family, dtype: torch.dtype, width: int) -> None:
        self._tower, self._family, self._dtype, self._width = tower, family, dtype, width
        vision: Any = tower.config.vision_config  # type: ignore[union-attr]
        self.num_deeper = len(getattr(vision, "deepstack_visual_indexes", ()))

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return ids, positions and segments; frames, rows and columns in families that have them; the vectors of all
        images, [N, D], or [1 + K, N, D] where K layers add others to their outputs; and their places [N] in the
        flattened ids [B x T]."""
        columns = inputs.columns
        places, given = columns[VECTOR_PLACES], {name: columns[name] for name in self._family.inputs}
        vectors = given["pixel_values"].new_empty(1 + self.num_deeper, 0, self._width, dtype=self._dtype)
        if len(places):
            model: Any = self._tower
            found = model.get_image_features(**given, return_dict=True)
            each = [found.pooler_output, *(found.deepstack_features if self.num_deeper else ())]
            # Of each the images, one tensor for each, or [images, vectors of one, D]
            vectors = torch.stack([torch.cat([image.flatten(0, -2) for image in images]) for images in each])
        spatial = (columns[SPATIAL_IDS],) if self._family.has_places else ()
        return inputs.input_ids, inputs.position_ids, inputs.segment_ids, *spatial, vectors.to(self._dtype), places


def build_front(module: StageModule, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
    """Give the stage that has the first layer its tower, and all stages what their layers need to know. Raises
    UserError for a model without a tower, and for a tensor that is missing."""
    wrapper = source.wrapper
    if wrapper is None:
        raise UserError(
            f"data=image_chat: {source.path} is a '{source.config.model_type}', which reads no images; give a model "
            "that does, or data=chat"
        )
    family = find_family(wrapper.config, str(source.path))
    for layer in module.local_layers:
        if isinstance(layer.module, PipelineDecoderLayer) and family.has_places:
            assert isinstance(layer.module.context, BackboneContext), layer.module.context
            layer.module.context.takes_spatial_ids = True
    if module.has_first_layer:
        front = ImageFront(load_tower(wrapper, source, device, dtype), family, dtype, source.config.hidden_size)
        module.front = front
        _hand_vectors_on(module, front.num_deeper)


def _hand_vectors_on(module: StageModule, num_deeper: int) -> None:
    """Have the embedding and the layers that add vectors to their outputs take them. Raises UserError where the first
    chunk has too few layers for that."""
    embedding, *layers = module.list_modules(0)
    deeper = [each for each in layers[:num_deeper] if isinstance(each, PipelineDecoderLayer)]
    if len(deeper) < num_deeper:
        raise UserError(
            f"data=image_chat: the first {num_deeper} layers of this model take vectors of images, and the first chunk "
            f"has {len(deeper)} of them; give fewer num_stages, or schedule=1f1b"
        )
    for number, layer in enumerate([embedding, *deeper]):
        layer.register_forward_hook(partial(_put_vectors, number, number == num_deeper))


def _put_vectors(number: int, is_last: bool, _module: nn.Module, _given: Any, outputs: tuple[Tensor, ...]) -> Any:
    """Return the outputs of the embedding (0), where vectors take the place of others, or of a decoder layer, where
    they are added. is_last: no later layer takes any."""
    hidden_states, *others, vectors, places = outputs
    rows = hidden_states.flatten(0, 1)
    put = rows.index_add(0, places, vectors[number]) if number else rows.index_copy(0, places, vectors[0])
    return put.view_as(hidden_states), *others, *(() if is_last else (vectors, places))


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
