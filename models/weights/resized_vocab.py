"""The weights of a model whose vocabulary grows while they are read, for tokens that a run adds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PretrainedConfig

from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from models.storage.safetensors_writer import TensorInfo
from models.weights.passthrough import find_passthrough
from models.weights.source import StoredWeights

COLUMNS_AT_A_TIME = 64  # bounds the fp32 copy that the mean of a bf16 matrix needs


class ResizedVocabWeights:
    """`StoredWeights` with more rows in the embedding and the head, each the mean of the old ones.

    A row depends on the old ones alone, so it is the same on every rank that reads it, at every layout. Only the matrix
    that grows is ever in memory.
    """

    def __init__(self, base: StoredWeights, config: PretrainedConfig) -> None:
        """config: the base's, with another `vocab_size`."""
        self.base, self.config, self.wrapper, self.path = base, config, base.wrapper, base.path
        self.config_dir = base.config_dir
        self._layers = build_layers(base.config, base.wrapper)

    def files(self) -> list[Path]:
        return self.base.files()

    def check_complete(self, layers: list[Layer]) -> None:
        self.base.check_complete(self._layers)

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        shapes = layer.shapes()
        described = self.base.describe_layer(index, self._layers[index])
        return {name: tensor.new_empty(shapes[name]) for name, tensor in described.items()}

    def list_passthrough(self) -> list[TensorInfo]:
        return list(self._passthrough.values())

    def read_passthrough(self, name: str) -> torch.Tensor:
        return resize_rows(self.base.read_passthrough(name), self._passthrough[name].shape)

    @cached_property
    def _passthrough(self) -> dict[str, TensorInfo]:
        passthrough = find_passthrough(self.base)
        resized = resize_copies(passthrough.unused, self.base.config, self.config)
        return {info.name: resized.get(info.name, info) for info in passthrough.kept}

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        tensors = self.base.read_layer(index, replace(self._layers[index], experts=layer.experts))
        shapes = layer.shapes() if tensors else {}
        return {name: resize_rows(tensor, shapes[name]) for name, tensor in tensors.items()}


def with_rows(config: PretrainedConfig, rows: int) -> PretrainedConfig:
    """Return a copy of a text model's config with another number of rows."""
    resized = copy.deepcopy(config)
    resized.vocab_size = rows
    return resized


def resize_copies(
    unused: Iterable[TensorInfo], config: PretrainedConfig, resized: PretrainedConfig
) -> dict[str, TensorInfo]:
    """Return those tensors that no layer reads with another number of rows: copies of the embedding and the head, which
    servers give as many rows as config.json says. config: of the source; resized: with another `vocab_size`."""
    if config.vocab_size == resized.vocab_size:
        return {}
    old, new = ((each.vocab_size, each.hidden_size) for each in (config, resized))
    return {info.name: replace(info, shape=new) for info in unused if info.shape == old}


def resize_rows(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return `tensor` [V, ...] with the rows of `shape`: itself, its first rows, or with new ones as `grow_rows`
    makes them."""
    if tensor.shape == torch.Size(shape):
        return tensor
    rows = shape[0]
    return grow_rows(tensor, rows) if rows > tensor.shape[0] else tensor[:rows]


def grow_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `weight` [V, ...] with `rows` rows; each new row is the mean of the old ones, computed in fp32.

    The mean keeps a new token's first logit in the range of the others, where zeros or noise would not.
    """
    old_rows = weight.shape[0]
    grown = torch.empty((rows, *weight.shape[1:]), dtype=weight.dtype)
    grown[:old_rows] = weight
    if weight.dim() == 1:
        grown[old_rows:] = weight.float().mean()
        return grown
    for old, new in zip(weight.split(COLUMNS_AT_A_TIME, dim=1), grown.split(COLUMNS_AT_A_TIME, dim=1), strict=True):
        new[old_rows:] = old.float().mean(dim=0)
    return grown
