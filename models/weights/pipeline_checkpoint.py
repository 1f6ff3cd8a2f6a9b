"""A pipeline checkpoint: a folder with `latest`, `config.json` and `global_stepN/layer_XX-model_states.pt`, names
without the layer's prefix. Converted folders and training checkpoints have the same shape.

Where there is a manifest, `check_complete` compares sizes, and a file's bytes are compared before its tensors are first
read: a pass over the file at the speed of the disk or of memory, after which it is in the page cache.
"""

from __future__ import annotations

from pathlib import Path

import torch

from errors import UserError
from models.adapters.folder import ADAPTER_CONFIG
from models.layers.layer import Layer
from models.storage.manifest import describe_missing, find_wrong_content, find_wrong_size, has_manifest, is_converted
from models.storage.safetensors_writer import TensorInfo
from models.storage.tensor_files import load_torch_file
from models.weights.config_file import load_config
from models.weights.passthrough import PASSTHROUGH_NAME, has_passthrough, list_passthrough, read_passthrough
from models.weights.source import check_tensors


def layer_file(step_dir: Path, index: int) -> Path:
    """Return DeepSpeed's path for a layer's weights."""
    return step_dir / f"layer_{index:02d}-model_states.pt"


class PipelineCheckpoint:
    """A pipeline checkpoint's layer files, from the converter or from training. What reads values raises UserError for
    a file whose bytes are not those of the manifest."""

    form = ""  # its layers are dequantized
    unconverted: tuple[str, ...] = ()

    def __init__(self, path: Path, tag: str, trust_checkpoint: bool = False) -> None:
        """trust_checkpoint: accept a training checkpoint without a manifest. Raises UserError otherwise."""
        self.path = self.config_dir = path
        self.step_dir = path / tag
        self._has_manifest = has_manifest(self.step_dir)
        if not (self._has_manifest or trust_checkpoint or is_converted(self.step_dir)):
            raise UserError(describe_missing(self.step_dir))
        self._checked: set[Path] = set()  # files whose bytes have been compared
        self.config, self.wrapper = load_config(path)

    @property
    def is_adapter(self) -> bool:
        """Whether the layer files hold an adapter's parameters only."""
        return (self.path / ADAPTER_CONFIG).is_file()

    def read_parameters(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors in the file of layer `index`, whatever their names and shapes."""
        file = layer_file(self.step_dir, index)
        self._compare_bytes(file)
        return load_torch_file(file)

    def read_adapter(self, index: int, layer: Layer, names: list[str]) -> dict[str, torch.Tensor]:
        tensors = self.read_parameters(index)
        return {name: tensors[name] for name in names if name in tensors}

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        tensors = self.read_parameters(index)
        check_tensors(tensors, layer, str(layer_file(self.step_dir, index)))
        return tensors

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        file = layer_file(self.step_dir, index)
        tensors = load_torch_file(file)  # its bytes are compared when they are read
        check_tensors(tensors, layer, str(file))
        return {name: tensor.to("meta") for name, tensor in tensors.items()}

    def count_held(self, index: int, layer: Layer) -> int:
        return 0

    def list_passthrough(self) -> list[TensorInfo]:
        return list_passthrough(self.path) if has_passthrough(self.config, self.wrapper) else []

    def read_passthrough(self, name: str) -> torch.Tensor:
        self._compare_bytes(self.path / PASSTHROUGH_NAME)
        return read_passthrough(self.path, name)

    def _compare_bytes(self, file: Path) -> None:
        if has_manifest(file.parent) and file.is_file() and file not in self._checked:
            _raise_damage(find_wrong_content(file.parent, [file.name]))
            self._checked.add(file)

    def files(self) -> list[Path]:
        return [self.path / "config.json", *sorted(self.step_dir.glob("layer_*-model_states.pt"))]

    def check_complete(self, layers: list[Layer]) -> None:
        expected = {layer_file(self.step_dir, i).name for i, layer in enumerate(layers) if layer.owns_weights}
        present = {file.name for file in self.step_dir.glob("layer_*-model_states.pt")}
        if missing := sorted(expected - present):
            raise UserError(
                f"{self.step_dir} is incomplete: {len(missing)} of {len(expected)} layer files missing, "
                f"first {missing[0]}; convert or save it again"
            )
        if extra := sorted(present - expected):
            raise UserError(
                f"{self.step_dir} holds {len(present)} layer files where config.json describes {len(expected)}; "
                f"first extra one {extra[0]}; does the config.json next to it belong to another model?"
            )
        if self._has_manifest:
            _raise_damage(find_wrong_size(self.step_dir, sorted(present)))
        self.list_passthrough()  # raises where they are missing


def _raise_damage(damage: str | None) -> None:
    if damage is not None:
        raise UserError(f"{damage}; copy the checkpoint again, or use another one")
