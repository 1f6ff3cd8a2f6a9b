"""The interface to weights of every form, and the check that tensors are those of a layer. `models/weights/sources.py`
opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.layers.layer import Layer
from models.layers.wrapped import Wrapper
from models.storage.safetensors_writer import TensorInfo


class DescribedModel(Protocol):
    """A model as its config.json describes it.

    path: the folder with the tokenizer if there is one, and usually config.json. config: of the text model. wrapper:
    the model that it is a part of; None where it is all of it. form: of the quantized weights in its files, a name in
    `FORMS` of `models/layers/frozen.py`; empty where there are none. unconverted: names of modules that are not in
    that form, by its config.json.
    """

    path: Path
    config: PretrainedConfig
    wrapper: Wrapper | None

    @property
    def form(self) -> str: ...

    @property
    def unconverted(self) -> tuple[str, ...]: ...


class WeightSource(DescribedModel, Protocol):
    """Where the weights of a model come from.

    config_dir: the folder with config.json, where that is not `path`: an adapter may bring a tokenizer alone.
    """

    config_dir: Path

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """Return the tensors of `layer`, named as in its module, checked against its shapes. Empty if the layer owns
        none. A tensor that is computed may have a wider dtype than it is described in."""

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """Return the tensors of `read_layer` on the meta device: names, shapes, and the dtypes in which they are
        stored, without reading values."""

    def count_held(self, index: int, layer: Layer) -> int:
        """Return the bytes of the host's memory that `read_layer` takes: of tensors that are assembled, dequantized or
        drawn. Those that are mapped from their file take none."""

    def check_complete(self, layers: list[Layer]) -> None:
        """Check that all tensors of the layers are there and no others. Raises UserError otherwise."""

    def files(self) -> list[Path]:
        """Return the files that determine the model's outputs."""

    def list_passthrough(self) -> list[TensorInfo]:
        """Return the tensors that are copied unchanged, by their names on disk: those outside the text model, and those
        that no layer reads (`models/architecture/unused.py`). Raises UserError for quantized ones outside."""

    def read_passthrough(self, name: str) -> torch.Tensor:
        """Return one tensor of `list_passthrough` by its name on disk, memory-mapped."""


def read_as_stored(source: WeightSource, index: int, layer: Layer) -> dict[str, torch.Tensor]:
    """Return the tensors of `layer`, the layer `index`, in the dtypes in which they are described."""
    described = source.describe_layer(index, layer)
    return {name: tensor.to(described[name].dtype) for name, tensor in source.read_layer(index, layer).items()}


def get_whole_config(source: DescribedModel) -> PretrainedConfig:
    """Return the config of the whole model, the one that transformers loads."""
    return source.config if source.wrapper is None else source.wrapper.config


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
