"""The weights of a new reward model: those of a causal language model, and a randomly drawn score head."""

from __future__ import annotations

from pathlib import Path

import torch

from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from models.layers.score_head import ScoreHead, describe_reward_model, is_reward_model
from models.layers.wrapped import Wrapper
from models.storage.safetensors_writer import TensorInfo
from models.weights.random_weights import RandomWeights
from models.weights.source import WeightSource


class WithScoreHead:
    """A `WeightSource`: the weights of `base` except its head. The new head is drawn from the seed and its index in the
    model, as in a model that is trained from scratch, so it is the same at every layout."""

    def __init__(self, base: WeightSource, seed: int) -> None:
        self._base, self.path = base, base.path
        self.config = describe_reward_model(base.config)
        self.wrapper: Wrapper | None = None
        self._drawn = RandomWeights(self.config, seed)

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        source = self._drawn if layer.module_class is ScoreHead else self._base
        return source.read_layer(index, layer)

    def check_complete(self, layers: list[Layer]) -> None:
        """Check the base model, including its own head."""
        self._base.check_complete(build_layers(self._base.config))

    def files(self) -> list[Path]:
        return self._base.files()

    def list_passthrough(self) -> list[TensorInfo]:
        return self._base.list_passthrough()

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self._base.read_passthrough(name)


def as_reward_model(source: WeightSource, seed: int) -> WeightSource:
    """Return `source` where it is a reward model already; else the same weights with a new head. Not for a text model
    inside another one."""
    return source if is_reward_model(source.config) else WithScoreHead(source, seed)
