"""Where weights come from: what every form of them offers. `models/weights/sources.py` opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from models.layer import Layer


class WeightSource(Protocol):
    """Where weights come from. `path` is the folder with config.json (and the tokenizer, if there is one)."""

    path: Path
    config: PretrainedConfig

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """The tensors of `layer`, named as in its module, checked against its shapes. Empty if the layer owns none."""

    def check_complete(self, layers: list[Layer]) -> None:
        """Raises UserError when something is missing, or is there and belongs to no layer."""

    def files(self) -> list[Path]:
        """All that decides what the model computes."""


class StoredWeights(WeightSource, Protocol):
    """Those that lie in files: a conversion plans what it writes before it reads them."""

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """What `read_layer` gives, on the meta device: names, shapes and dtypes, without reading numbers."""
