"""The edits by which a base model gets an adapter: its folder alone, or its weights merged in."""

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
from models.weights.edits import Edit, EditedWeights, EditOrder, ReadLayer
from models.weights.source import WeightSource

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


class AdapterFolder(Edit):
    """Gives a model the tokenizer and the config.json of an adapter that is put on its layers, and changes no weights.
    They come before those of the model where the adapter's folder has them."""

    order = EditOrder.ADAPTER

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_folders(self, before: WeightSource) -> tuple[Path, Path]:
        config_dir = self._folder if (self._folder / "config.json").is_file() else before.config_dir
        return self._folder if has_tokenizer(self._folder) or self._folder == config_dir else before.path, config_dir


class MergedAdapter(AdapterFolder):
    """Merges an adapter into a model, one layer at a time.

    Merged weights are read in fp32 or wider, so that they are rounded once, to the dtype in which they are used. They
    are described in the dtype of their base, in which they are written where no other is asked for.
    """

    changes_experts = True

    def __init__(
        self, folder: Path, lora: LoraConfig, read_adapter: ReadAdapter, files: list[Path], names: Collection[str] = ()
    ) -> None:
        """folder: of the adapter. files: the adapter's own. names: the tensors of a peft folder."""
        super().__init__(folder)
        self._lora, self._read_adapter, self._names = lora, read_adapter, names
        self.files = files

    def check(self, edited: EditedWeights, layers: list[Layer]) -> None:
        check_all_taken(self._names, self._lora, layers)

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        tensors = dict(read(index, layer))
        if any(tensor.is_meta for tensor in tensors.values()):  # merging keeps shapes
            return tensors
        module = layer.build_on_meta()
        if tensors and is_saved(layer, self._lora):
            names = [name for name, _ in module.named_parameters()]
            wide = {name: _widen(tensors[name]) for name in names}
            buffers = {name: tensors[name].clone() for name in tensors.keys() - wide.keys()}
            module.load_state_dict(wide | buffers, assign=True)
            fill_parameters(module, self._read_adapter(index, layer, names), names)
            return {name: tensor.detach() for name, tensor in module.state_dict().items()}
        targets = list_targets(module, layer, self._lora)
        if not tensors or not targets:
            return tensors
        changed = targets.weights
        # One at a time, since the experts of a layer may be most of a host's memory
        wide = {name: _widen(tensors.pop(name)) for name in changed}
        module.load_state_dict(tensors | wide, assign=True)
        inject_adapter(self._lora, module, layer)
        for name in adapter_names(module):
            parameter = module.get_parameter(name)
            parameter.data = _widen(parameter.data)
        fill_adapter(module, self._read_adapter(index, layer, adapter_names(module)))
        merged = merge_adapter(module)
        return tensors | {name: merged[name] for name in changed}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32 or wider, to which an adapter is added."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
