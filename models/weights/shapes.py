"""Checks that tensors are those of a layer: their names and shapes."""

from __future__ import annotations

import torch

from errors import UserError
from models.layers.layer import Layer


def check_tensors(tensors: dict[str, torch.Tensor], layer: Layer, where: str) -> None:
    """Check tensors against the layer's names and shapes. Raises UserError, which names the first tensor that is
    missing, unknown or of another shape. where: the file or folder they come from."""
    shapes = layer.shapes()
    if tensors.keys() != shapes.keys():
        wrong = sorted(tensors.keys() ^ shapes.keys())[0]
        state = "missing" if wrong in shapes else "unknown"
        raise UserError(
            f"{where}: tensor '{layer.hf_prefix}{wrong}' is {state}; "
            "the weights are of another model than config.json says"
        )
    for name, shape in shapes.items():
        check_shape(tensors[name], shape, layer.hf_prefix + name, where)


def check_shape(tensor: torch.Tensor, shape: torch.Size, name: str, where: str) -> None:
    """Check one tensor's shape. Raises UserError, which names it and `where` it comes from."""
    if tensor.shape != shape:
        raise UserError(f"{where}: '{name}' has shape {list(tensor.shape)}, config.json makes it {list(shape)}")
