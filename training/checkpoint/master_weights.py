"""The fp32 master weights of a checkpoint that was saved in a 16-bit precision, for a run that continues in fp32: the
layer files have them rounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from errors import UserError
from models.layers.layer import Layer
from models.weights.edits import Edit, EditedWeights, EditOrder, ReadLayer
from training.checkpoint.optimizer_state import FILE_PATTERN, WEIGHT, list_overlaps, parse_key

_RANK_DIMS = {".lora_A.": 0, ".lora_B.": 1}  # the dimension that the rank is


class MasterWeights(Edit):
    """The master weights in the optimizer's files of a step; none of a run in fp32. As an edit they take the place of
    the rounded ones."""

    order = EditOrder.MASTER_WEIGHTS

    def __init__(self, step_dir: Path, starts_from_base: bool = False) -> None:
        """starts_from_base: the adapter of the run did, so that a layer file has what it started as behind what is
        trained (`models/adapters/base_inits.py`)."""
        self._step_dir, self._starts_from_base = step_dir, starts_from_base
        self._places: defaultdict[str, list[tuple[Path, str]]] = defaultdict(list)  # parameter -> its fragments
        for file in sorted(step_dir.glob(FILE_PATTERN)):
            with safe_open(file, framework="pt") as saved:
                for key in saved.keys():
                    kind, name, _, _ = parse_key(key)
                    if kind == WEIGHT:
                        self._places[name].append((file, key))

    def __bool__(self) -> bool:
        return bool(self._places)

    def read_layer(self, edited: EditedWeights, index: int, layer: Layer, read: ReadLayer) -> dict[str, torch.Tensor]:
        return self.restore(layer, read(index, layer))

    def restore(self, layer: Layer, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, named as in its module, with the master weights in place of those that have
        some. Raises UserError where a part is missing."""
        return {name: self._restore(layer.hf_prefix + name, tensor) for name, tensor in tensors.items()}

    def _restore(self, name: str, rounded: torch.Tensor) -> torch.Tensor:
        dim = next((dim for matrix, dim in _RANK_DIMS.items() if matrix in name), None)
        if not self._starts_from_base or dim is None:
            return self._read(name, rounded)
        trained, start = rounded.chunk(2, dim)
        return torch.cat([self._read(name, trained), start], dim)

    def _read(self, name: str, rounded: torch.Tensor) -> torch.Tensor:
        if name not in self._places:
            return rounded
        if rounded.is_meta:
            return rounded.float()
        flat, missing = torch.empty(rounded.numel()), rounded.numel()
        for file, key in self._places[name]:
            with safe_open(file, framework="pt") as saved:
                fragment = saved.get_tensor(key)
            _, _, shard, start = parse_key(key)
            for low, to, length in list_overlaps((shard, start, fragment.numel()), (None, 0, flat.numel())):
                flat[to : to + length] = fragment[low : low + length]
                missing -= length
        if missing:
            raise UserError(
                f"resume: {self._step_dir} lacks {missing} fp32 weights of '{name}'; copy the checkpoint again, or use "
                "another one"
            )
        return flat.view(rounded.shape)
