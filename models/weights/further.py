"""The edit by which the layers that predict further tokens are read as layers, where a source passes them through.

A source lists layers and passthrough tensors as its own config.json describes them. Published folders, and what is
converted from them, have further layers among the passthrough tensors; checkpoints of a run with `mtp.loss_coef` have
them as layers.
"""

from __future__ import annotations

import copy
from functools import reduce

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.further.table import count_trained, list_copies, set_trained
from models.layers.layer import Layer, TensorPiece
from models.storage.safetensors_writer import TensorInfo
from models.weights.edits import Edit, EditedWeights, EditOrder, ReadLayer
from models.weights.source import WeightSource, check_shape, check_tensors, read_as_stored


class FurtherLayers(Edit):
    """Makes layers of the passthrough tensors that further layers read. Not for a text model inside another one."""

    order = EditOrder.FURTHER_LAYERS

    def edit_config(self, before: WeightSource) -> PretrainedConfig:
        config = copy.deepcopy(before.config)
        set_trained(config, trains=True)
        return config

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        if not edited.layers[index].is_further:
            return read(index - sum(each.is_further for each in edited.layers[:index]), layer)
        if not layer.owns_weights:
            return {}
        tensors = {name: _read_tensor(edited, layer, name, shape) for name, shape in layer.shapes().items()}
        check_tensors(tensors, layer, str(edited.path))
        return tensors

    def count_held(self, edited: EditedWeights, index: int, layer: Layer) -> int:
        if not (edited.layers[index].is_further and layer.owns_weights):
            return super().count_held(edited, index, layer)
        sizes = {info.name: info.nbytes for info in edited.before.list_passthrough()}
        pieces = (piece for name in layer.shapes() for piece in _list_pieces(layer, name) if piece.index)
        return sum(sizes[piece.hf_name] for piece in pieces)

    def list_passthrough(self, edited: EditedWeights) -> list[TensorInfo]:
        taken = _list_read(edited.layers) | list_copies(edited.config, edited.layers).keys()
        return [info for info in edited.before.list_passthrough() if info.name not in taken]

    def check(self, edited: EditedWeights, layers: list[Layer]) -> None:
        present = {info.name for info in edited.before.list_passthrough()}
        if missing := sorted(_list_read(edited.layers) - present):
            raise UserError(
                f"mtp.loss_coef: {edited.path} has no tensor '{missing[0]}' ({len(missing)} of the layers that predict "
                "further tokens are missing); give mtp.loss_coef=0, or a folder that has them"
            )
        copies = list_copies(edited.config, edited.layers)
        for name in sorted(copies.keys() & present):
            _check_copy(edited, name, copies[name])


def _list_read(layers: list[Layer]) -> set[str]:
    """Return the names of the tensors that the further layers read."""
    return {
        piece.hf_name
        for layer in layers
        if layer.is_further and layer.owns_weights
        for name in layer.shapes()
        for piece in layer.get_pieces(name)
    }


def _list_pieces(layer: Layer, name: str) -> list[TensorPiece]:
    """Return the pieces of a tensor that this rank reads."""
    return [piece for piece in layer.get_pieces(name) if layer.reads(name, piece)]


def _read_tensor(edited: EditedWeights, layer: Layer, name: str, shape: torch.Size) -> torch.Tensor:
    pieces = _list_pieces(layer, name)
    parts = [edited.before.read_passthrough(piece.hf_name) for piece in pieces]
    if not pieces[0].index:
        return parts[0]
    tensor = torch.empty(shape, dtype=reduce(torch.promote_types, (part.dtype for part in parts)))
    for piece, part in zip(pieces, parts, strict=True):
        place = tensor[piece.index]
        check_shape(part, place.shape, piece.hf_name, str(edited.path))
        place.copy_(part)
    return tensor


def _check_copy(edited: EditedWeights, name: str, index: int) -> None:
    """Raise UserError for a copy of embedding or head that differs from the model's own, which would take its place.
    index: of the layer with the model's own."""
    layer = edited.layers[index]
    if not torch.equal(read_as_stored(edited, index, layer)["weight"], edited.before.read_passthrough(name)):
        raise UserError(
            f"mtp.loss_coef: {edited.path}: '{name}' differs from '{layer.hf_prefix}weight', and both are trained as a "
            "single tensor; give mtp.loss_coef=0, or a folder in which they are equal"
        )


def choose_further(source: WeightSource, trains: bool) -> list[Edit]:
    """Return the edit that makes layers of the further layers; none where the model has them as they are needed.

    trains: whether they are. Raises UserError for a checkpoint that has them as layers where they are not.
    """
    has_layers = count_trained(source.config) > 0
    if has_layers and not trains:
        raise UserError(
            f"{source.path} was trained with mtp.loss_coef, and its layers that predict further tokens are among its "
            "layers; give mtp.loss_coef, or a Hugging Face folder of it (convert2ckpt.py --to_hf)"
        )
    if has_layers or not trains or not source.files():  # random weights are drawn for any layers
        return []
    return [FurtherLayers()]
