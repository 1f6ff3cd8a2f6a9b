"""The weights of a base model with an adapter merged in."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models.adapters.adapter import (
    adapter_names,
    check_all_taken,
    fill_adapter,
    fill_parameters,
    inject_adapter,
    merge_adapter,
)
from models.adapters.folder import ReadAdapter
from models.adapters.targets import is_saved, list_targets
from models.layers.layer import Layer
from models.storage.folders import has_tokenizer
from models.storage.safetensors_writer import TensorInfo
from models.weights.source import StoredWeights

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


class AdaptedWeights:
    """The weights of a base model with an adapter merged in, one layer at a time: `StoredWeights`. names: the tensors
    of a peft folder."""

    def __init__(
        self,
        base: StoredWeights,
        path: Path,
        config: LoraConfig,
        *,
        read_adapter: ReadAdapter,
        adapter_files: list[Path],
        names: Collection[str] = (),
    ) -> None:
        self.base, self.config, self.wrapper, self._names = base, base.config, base.wrapper, names
        self.config_dir = path if (path / "config.json").is_file() else base.config_dir
        self.path = path if has_tokenizer(path) or path == self.config_dir else base.path
        self._lora, self._read_adapter, self._adapter_files = config, read_adapter, adapter_files

    def files(self) -> list[Path]:
        return [*self.base.files(), *self._adapter_files]

    def check_complete(self, layers: list[Layer]) -> None:
        self.base.check_complete(layers)
        check_all_taken(self._names, self._lora, layers)

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self.base.describe_layer(index, layer)

    def list_passthrough(self) -> list[TensorInfo]:
        return self.base.list_passthrough()

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self.base.read_passthrough(name)

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        tensors = self.base.read_layer(index, layer)
        module = layer.build_on_meta()
        if tensors and is_saved(layer, self._lora):
            names = [name for name, _ in module.named_parameters()]
            module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
            fill_parameters(module, self._read_adapter(index, layer, names), names)
            return {name: tensor.detach() for name, tensor in module.state_dict().items()}
        targets = list_targets(module, layer, self._lora)
        if not tensors or not targets:
            return tensors
        changed = targets.weights
        wide = {name: _widen(tensors[name]) for name in changed - set(targets.stacks)}
        stacks = {name: tensors[name].clone() for name in targets.stacks}  # as large as they are, summed by expert
        module.load_state_dict(tensors | wide | stacks, assign=True)
        inject_adapter(self._lora, module, layer)
        for name in adapter_names(module):
            parameter = module.get_parameter(name)
            parameter.data = _widen(parameter.data)
        fill_adapter(module, self._read_adapter(index, layer, adapter_names(module)))
        merged = merge_adapter(module)
        return tensors | {name: merged[name].to(tensors[name].dtype) for name in changed}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32 or wider, to which an adapter is added."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
