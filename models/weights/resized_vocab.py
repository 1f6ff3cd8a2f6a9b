"""The edit that gives a vocabulary more rows while its weights are read, for tokens that a run adds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from models.layers.layer import Layer
from models.storage.safetensors_writer import TensorInfo
from models.weights.edits import Edit, EditedWeights, EditOrder, ReadLayer
from models.weights.passthrough import find_passthrough
from models.weights.source import WeightSource

COLUMNS_AT_A_TIME = 64  # bounds the fp32 copy that the mean of a bf16 matrix needs


class ResizedVocabulary(Edit):
    """Gives the embedding and the head more rows, each the mean of the old ones.

    A row depends on the old ones alone, so it is the same on every rank that reads it, at every layout. Only the matrix
    that grows is ever in memory.
    """

    order = EditOrder.VOCABULARY

    def __init__(self, config: PretrainedConfig) -> None:
        """config: that of the model, with another `vocab_size`."""
        self._config = config

    def edit_config(self, before: WeightSource) -> PretrainedConfig:
        return self._config

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        tensors = read(index, replace(edited.layers_before[index], experts=layer.experts, kept=layer.kept))
        shapes = layer.shapes() if tensors else {}
        return {name: resize_rows(tensor, shapes[name]) for name, tensor in tensors.items()}

    def list_passthrough(self, edited: EditedWeights) -> list[TensorInfo]:
        passthrough = find_passthrough(edited.before)
        resized = resize_copies(passthrough.unused, edited.before.config, self._config)
        return [resized.get(info.name, info) for info in passthrough.kept]

    def read_passthrough(self, edited: EditedWeights, name: str) -> torch.Tensor:
        return resize_rows(edited.before.read_passthrough(name), edited.passthrough[name].shape)


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
    grown = weight.new_empty((rows, *weight.shape[1:]))
    grown[:old_rows] = weight
    if weight.dim() == 1:
        grown[old_rows:] = weight.float().mean()
        return grown
    for old, new in zip(weight.split(COLUMNS_AT_A_TIME, dim=1), grown.split(COLUMNS_AT_A_TIME, dim=1), strict=True):
        new[old_rows:] = old.float().mean(dim=0)
    return grown
