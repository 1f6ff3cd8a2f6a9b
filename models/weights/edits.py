"""Edits of weights, which are made while these are read: a larger vocabulary, another head, an adapter merged in.

A source of weights is one of three readers (`hugging_face_folder.py`, `pipeline_checkpoint.py`, `random_weights.py`),
or `EditedWeights` over another source. An edit says what it changes of the config, of the list of tensors, and of the
tensors of a layer; `EditedWeights` does all else, for every edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum, auto
from functools import cached_property, reduce
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PretrainedConfig

from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from models.storage.safetensors_writer import TensorInfo
from models.weights.source import WeightSource

ReadLayer = Callable[[int, Layer], dict[str, torch.Tensor]]


class EditOrder(IntEnum):
    """The order of edits that are made together."""

    VOCABULARY = auto()  # first: all that follows is built with its rows
    HEAD = auto()
    FURTHER_LAYERS = auto()
    UNTIED_HEAD = auto()  # copies the embedding with all its rows
    ADAPTER = auto()  # was trained on a model with all edits above
    MASTER_WEIGHTS = auto()  # last: they are what a run has trained


class Edit:
    """A change to the weights of a model. A subclass overrides what it changes; by default all stays as it is.

    Each method gets the weights after the edit, which name what was before (`EditedWeights.before`, `layers_before`);
    `edit_config` and `find_folders`, with which these begin, get the weights before.
    """

    order: ClassVar[EditOrder]
    files: Sequence[Path] = ()  # further files that determine the model's outputs
    changes_experts: ClassVar[bool] = False  # so that they are no longer as their files hold them

    def edit_config(self, before: WeightSource) -> PretrainedConfig:
        """Return the config of the edited model. Raises UserError for a model that cannot be edited in this way."""
        return before.config

    def find_folders(self, before: WeightSource) -> tuple[Path, Path]:
        """Return `path` and `config_dir` of the edited weights (`WeightSource`)."""
        return before.path, before.config_dir

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        """Return the tensors of `layer`, the layer `index` after the edit. read: returns those of a layer before it; on
        the meta device where only shapes and dtypes are asked for."""
        return read(index, layer)

    def name_before(self, edited: EditedWeights, layer: Layer) -> Layer:
        """Return a layer after the edit with the names that its tensors have before it."""
        return layer

    def count_held(self, edited: EditedWeights, index: int, layer: Layer) -> int:
        """Return the bytes of `WeightSource.count_held`: the limit of what was before, since an edit copies at most the
        tensors of a layer."""
        named = edited.name_before(layer)
        for number, own in enumerate(edited.layers_before):
            if own.hf_prefix == named.hf_prefix:
                return edited.before.count_held(number, replace(own, experts=layer.experts, kept=layer.kept))
        return 0

    def list_passthrough(self, edited: EditedWeights) -> list[TensorInfo]:
        """Return the passthrough tensors of the edited weights."""
        return edited.before.list_passthrough()

    def read_passthrough(self, edited: EditedWeights, name: str) -> torch.Tensor:
        """Return a passthrough tensor of the edited weights."""
        return edited.before.read_passthrough(name)

    def check(self, edited: EditedWeights, layers: list[Layer]) -> None:
        """Check that the edit can be made to all weights, which were complete before it. layers: of the edited model.
        Raises UserError otherwise."""


class EditedWeights:
    """A `WeightSource`: the weights of another one, with one edit."""

    def __init__(self, before: WeightSource, edit: Edit) -> None:
        """Raises UserError for a model that cannot be edited in this way."""
        self.before, self._edit = before, edit
        self.config, self.wrapper = edit.edit_config(before), before.wrapper
        self.path, self.config_dir = edit.find_folders(before)

    @property
    def form(self) -> str:
        return "" if self._edit.changes_experts else self.before.form

    @property
    def unconverted(self) -> tuple[str, ...]:
        return self.before.unconverted

    @cached_property
    def layers_before(self) -> list[Layer]:
        """The layers of the model before the edit."""
        return build_layers(self.before.config, self.before.wrapper)

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers of the edited model."""
        return build_layers(self.config, self.wrapper)

    @cached_property
    def passthrough(self) -> dict[str, TensorInfo]:
        """The passthrough tensors by name."""
        return {info.name: info for info in self._edit.list_passthrough(self)}

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self._edit.read_layer(self, index, layer, self.before.read_layer)

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        tensors = self._edit.read_layer(self, index, layer, self.before.describe_layer)
        return {name: tensor.to("meta") for name, tensor in tensors.items()}

    def name_before(self, layer: Layer) -> Layer:
        """See `Edit.name_before`."""
        return self._edit.name_before(self, layer)

    def count_held(self, index: int, layer: Layer) -> int:
        return self._edit.count_held(self, index, layer)

    def check_complete(self, layers: list[Layer]) -> None:
        self.before.check_complete(self.layers_before)
        self._edit.check(self, layers)

    def files(self) -> list[Path]:
        return [*self.before.files(), *self._edit.files]

    def list_passthrough(self) -> list[TensorInfo]:
        return list(self.passthrough.values())

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self._edit.read_passthrough(self, name)


def edit_weights(source: WeightSource, edits: Iterable[Edit]) -> WeightSource:
    """Return `source` with the edits, which are made in the order of `EditOrder`, each to the result of the last.
    Without any it is `source` itself. Raises UserError for a model that cannot be edited so."""
    return reduce(EditedWeights, sorted(edits, key=lambda edit: edit.order), source)
