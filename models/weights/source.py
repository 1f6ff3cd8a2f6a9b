"""Where weights come from: what every form of them offers. `models/weights/sources.py` opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from models.layers.layer import Layer
from models.layers.wrapped import Wrapper
from models.storage.safetensors_writer import TensorInfo


class WeightSource(Protocol):
    """Where weights come from. `path` is the folder with config.json (and the tokenizer, if there is one).

    config: of the text model. wrapper: the model that it is a part of; None where it is all of it.
    """

    path: Path
    config: PretrainedConfig
    wrapper: Wrapper | None

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """The tensors of `layer`, named as in its module, checked against its shapes. Empty if the layer owns none."""

    def check_complete(self, layers: list[Layer]) -> None:
        """Raises UserError when something is missing, or is there and belongs to no layer."""

    def files(self) -> list[Path]:
        """All that decides what the model computes."""

    def list_passthrough(self) -> list[TensorInfo]:
        """The tensors beside the text model, by their names on disk; they are carried along as they are. Raises
        UserError for quantized ones."""

    def read_passthrough(self, name: str) -> torch.Tensor:
        """One of them, mapped from its file."""


class StoredWeights(WeightSource, Protocol):
    """Those that lie in files: a conversion plans what it writes before it reads them."""

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """What `read_layer` gives, on the meta device: names, shapes and dtypes, without reading numbers."""


def get_whole_config(source: WeightSource) -> PretrainedConfig:
    """That of the whole model, the one that others load."""
    return source.config if source.wrapper is None else source.wrapper.config
