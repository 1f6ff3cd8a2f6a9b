"""Weights of which the layers that predict further tokens are read as layers, where their source passes them through;
and the other way round.

A source lists layers and passthrough tensors as its own config.json describes them. Published folders, and what is
converted from them, have further layers among the passthrough tensors; checkpoints of a run with `mtp.loss_coef` have
them as layers.
"""

from __future__ import annotations

import copy
from functools import cached_property, reduce
from pathlib import Path
from typing import cast

import torch

from errors import UserError
from models.architecture.lookup import build_layers
from models.further.table import count_trained, list_copies, set_trained
from models.layers.layer import Layer
from models.storage.safetensors_writer import TensorInfo
from models.weights.source import StoredWeights, WeightSource, check_shape, check_tensors


class FurtherWeights:
    """The weights of `base`, whose further layers are read from its passthrough tensors: `StoredWeights`. Not for a
    text model inside another one."""

    def __init__(self, base: StoredWeights) -> None:
        self.base, self.path, self.wrapper = base, base.path, base.wrapper
        self.config_dir = base.config_dir
        self.config = copy.deepcopy(base.config)
        set_trained(self.config, trains=True)
        self._layers = build_layers(self.config)
        self._own = build_layers(base.config)
        rest = iter(range(len(self._own)))
        self._indices = [None if layer.is_further else next(rest) for layer in self._layers]

    def files(self) -> list[Path]:
        return self.base.files()

    def check_complete(self, layers: list[Layer]) -> None:
        self.base.check_complete(self._own)
        present = {info.name for info in self.base.list_passthrough()}
        if missing := sorted(self._names - present):
            raise UserError(
                f"mtp.loss_coef: {self.path} has no tensor '{missing[0]}' ({len(missing)} of the layers that predict "
                "further tokens are missing); give mtp.loss_coef=0, or a folder that has them"
            )
        for name in sorted(self._copies.keys() & present):
            self._check_copy(name)

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        own = self._indices[index]
        if own is not None:
            return self.base.read_layer(own, layer)
        return self._read(layer) if layer.owns_weights else {}

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        own = self._indices[index]
        if own is not None:
            return self.base.describe_layer(own, layer)
        return {name: tensor.to("meta") for name, tensor in self.read_layer(index, layer).items()}

    def list_passthrough(self) -> list[TensorInfo]:
        return [info for info in self.base.list_passthrough() if info.name not in self._names | self._copies.keys()]

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self.base.read_passthrough(name)

    @cached_property
    def _copies(self) -> dict[str, int]:
        return list_copies(self.config, self._layers)

    @cached_property
    def _names(self) -> set[str]:
        """The tensors that the further layers read."""
        return {
            piece.hf_name
            for layer in self._layers
            if layer.is_further and layer.owns_weights
            for name in layer.shapes()
            for piece in layer.get_pieces(name)
        }

    def _read(self, layer: Layer) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, shape in layer.shapes().items():
            pieces = [piece for piece in layer.get_pieces(name) if layer.reads(name, piece)]
            parts = [self.base.read_passthrough(piece.hf_name) for piece in pieces]
            if not pieces[0].index:
                tensors[name] = parts[0]
                continue
            dtype = reduce(torch.promote_types, (part.dtype for part in parts))
            tensors[name] = torch.empty(shape, dtype=dtype)
            for piece, part in zip(pieces, parts, strict=True):
                place = tensors[name][piece.index]
                check_shape(part, place.shape, piece.hf_name, str(self.path))
                place.copy_(part)
        check_tensors(tensors, layer, str(self.path))
        return tensors

    def _check_copy(self, name: str) -> None:
        """Raise UserError for a copy of embedding or head that differs from the model's own, which would take its
        place."""
        index = self._copies[name]
        layer = self._layers[index]
        if not torch.equal(self.read_layer(index, layer)["weight"], self.base.read_passthrough(name)):
            raise UserError(
                f"mtp.loss_coef: {self.path}: '{name}' differs from '{layer.hf_prefix}weight', and both are trained as "
                "a single tensor; give mtp.loss_coef=0, or a folder in which they are equal"
            )


def add_further(source: WeightSource, trains: bool) -> WeightSource:
    """Return `source` where it has the further layers as they are needed, else with them as layers.

    trains: whether they are. Raises UserError for a checkpoint that has them as layers where they are not.
    """
    has_layers = count_trained(source.config) > 0
    if has_layers and not trains:
        raise UserError(
            f"{source.path} was trained with mtp.loss_coef, and its layers that predict further tokens are among its "
            "layers; give mtp.loss_coef, or a Hugging Face folder of it (convert2ckpt.py --to_hf)"
        )
    if has_layers or not trains or not source.files():  # random weights are drawn for any layers
        return source
    return FurtherWeights(cast("StoredWeights", source))  # what has files is stored
