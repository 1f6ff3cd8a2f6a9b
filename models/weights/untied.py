"""The weights of a model whose head becomes a matrix of its own, for an adapter that has trained it apart."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from errors import UserError
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from models.layers.wrapped import Wrapper
from models.storage.safetensors_writer import TensorInfo
from models.weights.source import StoredWeights


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
