"""The weights of a model that gets a new head: those of a causal language model with a randomly drawn one, or with a
copy of its embedding where they were tied."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from errors import UserError
from models.architecture.lookup import build_layers
from models.heads.head import Head, Labels
from models.heads.table import describe_head, find_head
from models.layers.layer import Layer
from models.layers.wrapped import Wrapper
from models.storage.safetensors_writer import TensorInfo
from models.weights.random_weights import RandomWeights
from models.weights.source import StoredWeights, WeightSource


class WithNewHead:
    """A `WeightSource`: the weights of `base` except its head. The new head is drawn from the seed and its index in the
    model, as in a model that is trained from scratch, so it is the same at every layout."""

    def __init__(self, base: WeightSource, head: Head, labels: Labels, seed: int) -> None:
        self._base, self.path, self.config_dir = base, base.path, base.config_dir
        self.config = describe_head(base.config, head, labels)
        self.wrapper: Wrapper | None = None
        self._head, self._drawn = head, RandomWeights(self.config, seed)

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if self._is_head(layer):
            return self._drawn.read_layer(index, layer) if self._head.has_weights else {}
        return self._base.read_layer(index, self._name_in_base(index, layer))

    def check_complete(self, layers: list[Layer]) -> None:
        """Check the base model, including its own head."""
        self._base.check_complete(self._base_layers)

    def files(self) -> list[Path]:
        return self._base.files()

    def list_passthrough(self) -> list[TensorInfo]:
        return self._base.list_passthrough() if self._head.has_weights else []  # their names are of another class

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self._base.read_passthrough(name)

    def _name_in_base(self, index: int, layer: Layer) -> Layer:
        """Return the layer with the names that its tensors have in the base model."""
        named = self._base_layers[index]
        return replace(layer, hf_prefix=named.hf_prefix, pieces=named.pieces)

    @cached_property
    def _base_layers(self) -> list[Layer]:
        return build_layers(self._base.config)

    def _is_head(self, layer: Layer) -> bool:
        return layer.hf_prefix == self._head.prefix


class StoredWithNewHead(WithNewHead):
    """The same of weights in files: `StoredWeights`. For an adapter that brings the trained head along."""

    def __init__(self, base: StoredWeights, head: Head, labels: Labels) -> None:
        super().__init__(base, head, labels, seed=0)
        self._stored = base

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if self._is_head(layer):
            return dict(layer.build_on_meta().state_dict())
        return self._stored.describe_layer(index, self._name_in_base(index, layer))


def add_head(source: WeightSource, head: Head, labels: Labels, seed: int) -> WeightSource:
    """Return `source` where it has this head already; else the same weights with a new one. Not for a text model inside
    another one."""
    return source if find_head(source.config) is head else WithNewHead(source, head, labels, seed)


class UntiedWeights:
    """`StoredWeights` of a model that is tied, as one that is not: the head begins as a copy of the embedding."""

    def __init__(self, base: StoredWeights) -> None:
        """Raises UserError for a text model inside another one, whose config names the tie too."""
        if base.wrapper is not None:
            raise UserError(
                f"the adapter has trained the head of {base.path} apart from the embedding, and '{base.wrapper.name}' "
                "ties them; merge the adapter with peft first"
            )
        self.base, self.path, self.config_dir = base, base.path, base.config_dir
        self.wrapper: Wrapper | None = None
        self.config = copy.deepcopy(base.config)
        self.config.tie_word_embeddings = False
        self._layers = build_layers(base.config)

    def files(self) -> list[Path]:
        return self.base.files()

    def check_complete(self, layers: list[Layer]) -> None:
        self.base.check_complete(self._layers)

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self.base.read_layer(*self._find(index, layer))

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self.base.describe_layer(*self._find(index, layer))

    def list_passthrough(self) -> list[TensorInfo]:
        return self.base.list_passthrough()

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self.base.read_passthrough(name)

    def _find(self, index: int, layer: Layer) -> tuple[int, Layer]:
        """Return the layer of the base that has the weights of a layer here."""
        return (0, self._layers[0]) if self._layers[index].is_tied_head else (index, layer)
