"""The edits of a head: a model gets another, randomly drawn one, or its own apart from the embedding."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.heads.head import Head, Labels
from models.heads.table import describe_head, find_head
from models.layers.layer import Layer
from models.storage.safetensors_writer import TensorInfo
from models.weights.edits import Edit, EditedWeights, EditOrder, ReadLayer
from models.weights.random_weights import RandomWeights
from models.weights.source import WeightSource


class NewHead(Edit):
    """Gives a model another head. It is drawn from the seed and its index in the model, as in a model that is trained
    from scratch, so it is the same at every layout. Not for a text model inside another one."""

    order = EditOrder.HEAD

    def __init__(self, head: Head, labels: Labels, seed: int) -> None:
        self._head, self._labels, self._seed = head, labels, seed

    def edit_config(self, before: WeightSource) -> PretrainedConfig:
        return describe_head(before.config, self._head, self._labels)

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        if layer.hf_prefix == self._head.prefix:
            return RandomWeights(edited.config, self._seed).read_layer(index, layer) if self._head.has_weights else {}
        return read(index, self.name_before(edited, layer))

    def name_before(self, edited: EditedWeights, layer: Layer) -> Layer:
        pairs = zip(edited.layers, edited.layers_before, strict=True)
        others = {own.hf_prefix: before for own, before in pairs if own.hf_prefix != self._head.prefix}
        named = others.get(layer.hf_prefix, layer)
        return replace(layer, hf_prefix=named.hf_prefix, pieces=named.pieces)

    def list_passthrough(self, edited: EditedWeights) -> list[TensorInfo]:
        return super().list_passthrough(edited) if self._head.has_weights else []  # their names are of another class


def choose_head(source: WeightSource, head: Head, labels: Labels, seed: int) -> list[Edit]:
    """Return the edit that gives a model this head; none where it has it already."""
    return [] if find_head(source.config) is head else [NewHead(head, labels, seed)]


class UntiedHead(Edit):
    """Makes a model that is tied one that is not: the head begins as a copy of the embedding."""

    order = EditOrder.UNTIED_HEAD

    def edit_config(self, before: WeightSource) -> PretrainedConfig:
        """Raises UserError for a text model inside another one, whose config names the tie too."""
        if before.wrapper is not None:
            raise UserError(
                f"the adapter has trained the head of {before.path} apart from the embedding, and "
                f"'{before.wrapper.name}' ties them; merge the adapter with peft first"
            )
        config = copy.deepcopy(before.config)
        config.tie_word_embeddings = False
        return config

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        is_head = edited.layers_before[index].is_tied_head
        return read(0, edited.layers_before[0]) if is_head else read(index, layer)
