"""The fp32 master weights of a checkpoint, for a run that continues in another precision. One that was saved in 16 bits
has them in the optimizer's files, and its layer files have them rounded; one that was saved in fp32 has them in its
layer files alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from errors import UserError
from models.adapters.base_inits import count_starts
from models.layers.layer import Layer
from models.storage.tensor_files import load_torch_file
from models.weights.edits import Edit, EditedWeights, EditOrder, ReadLayer
from models.weights.pipeline_checkpoint import layer_file
from training.checkpoint.optimizer_state import FILE_PATTERN, WEIGHT, list_fragments, list_overlaps, parse_key
from training.engine.engine import Engine

_RANK_DIMS = {".lora_A.": 0, ".lora_B.": 1}  # the dimension that the rank is


class MasterWeights(Edit):
    """The master weights in the optimizer's files of a step; none of a run in fp32. As an edit they take the place of
    the rounded ones."""

    order = EditOrder.MASTER_WEIGHTS
    changes_experts = True

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
        dim = _find_rank_dim(name)
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


def _find_rank_dim(name: str) -> int | None:
    return next((dim for matrix, dim in _RANK_DIMS.items() if matrix in name), None)


def restore_rounded(engine: Engine, step_dir: Path) -> None:
    """Fill the master weights of a run in 16 bits from a checkpoint that was saved in fp32: its weights were rounded
    when they were loaded, and the master weights made of them. Without an effect where the optimizer's files have them,
    and in a run in fp32. The bytes of the layer files were compared when the weights were read from them.

    Raises UserError for a file that cannot be read."""
    if MasterWeights(step_dir):
        return
    places = {
        layer.spec.hf_prefix + name: (layer, name)
        for layer in engine.module.local_layers
        for name, _ in layer.module.named_parameters()
    }
    for fragment in list_fragments(engine):
        if fragment.is_weight:
            continue
        layer, name = places[fragment.name]
        saved, dim = load_torch_file(layer_file(step_dir, layer.index))[name], _find_rank_dim(name)
        if dim is not None and count_starts(layer.module):
            saved = saved.chunk(2, dim)[0]  # without what the adapter started as
        target, flat = fragment.states[WEIGHT], saved.reshape(-1)
        assert isinstance(target, torch.Tensor)
        here, there = (None, 0, flat.numel()), (fragment.shard, fragment.start, target.numel())
        for low, to, length in list_overlaps(here, there):
            target[to : to + length].copy_(flat[low : low + length])
