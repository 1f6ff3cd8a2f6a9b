"""Passthrough tensors: those of a wrapped model outside its text model, and those that no layer reads, such as layers
that predict further tokens (`models/architecture/unused.py`). They are in one file next to config.json that keeps their
names on disk, their dtypes and their bits.

A converted folder has it, and a run's `checkpoints/`, once for all steps: training changes none of them. config.json
says how many tensors it holds (`passthrough_tensors`). A folder without that number has no file, or it is from before,
when only wrapped models had one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from console import pluralize
from errors import UserError
from models.architecture.unused import clear_further_layers, find_unread, group_names
from models.further.table import TRAINED
from models.layers.wrapped import Wrapper
from models.storage.manifest import HashedFile, write_manifest
from models.storage.safetensors_writer import TensorInfo, write_safetensors_to
from models.storage.tensor_files import open_safetensors
from models.weights.config_file import PASSTHROUGH_TENSORS
from models.weights.source import WeightSource

PASSTHROUGH_NAME = "carried.safetensors"


class Passthrough(NamedTuple):
    """The passthrough tensors of a source. kept: what is copied. unused: those that no layer reads; omitted: whether
    they are left out."""

    kept: Sequence[TensorInfo] = ()
    unused: Sequence[TensorInfo] = ()
    omits_unused: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of what is copied."""
        return count_bytes(self.kept)

    def update_config(self, fields: dict[str, Any], config: PretrainedConfig, is_pipeline: bool) -> bool:
        """Update `fields`, the content of config.json next to what is copied, and return whether they have changed.
        config: of the text model. is_pipeline: the copy is in a file of its own."""
        before = copy.deepcopy(fields)
        fields.pop(PASSTHROUGH_TENSORS, None)
        if not is_pipeline:
            fields.pop(TRAINED, None)
        if self.kept and is_pipeline:
            fields[PASSTHROUGH_TENSORS] = len(self.kept)
        if self.unused and self.omits_unused:
            clear_further_layers(fields, config)
        return fields != before

    def describe_unused(self) -> str:
        """Return their number, their size and the parts of the model that they are in; empty where there are none."""
        if not self.unused:
            return ""
        groups = "; ".join(f"{name}: {count}" for name, count in group_names(info.name for info in self.unused).items())
        return f"{pluralize(len(self.unused), 'tensor')} that no layer reads ({render_mib(self.unused)}; {groups})"


def find_passthrough(source: WeightSource, export_unused: bool = True) -> Passthrough:
    """Return the passthrough tensors of `source`. export_unused: whether those that no layer reads are copied too."""
    every = source.list_passthrough()
    unused = every if source.wrapper is None else _choose_unused(every, source.config, source.wrapper)
    names = {info.name for info in unused}
    kept = every if export_unused else [info for info in every if info.name not in names]
    return Passthrough(kept, unused, not export_unused)


def _choose_unused(infos: list[TensorInfo], config: PretrainedConfig, wrapper: Wrapper) -> list[TensorInfo]:
    named = {wrapper.name_in_memory(info.name): info for info in infos}
    unread, _ = find_unread(config, wrapper, named, ())
    return [info for name, info in named.items() if name in unread]


def count_bytes(infos: Iterable[TensorInfo]) -> int:
    """Return the bytes of the tensors together."""
    return sum(info.nbytes for info in infos)


def render_mib(infos: Iterable[TensorInfo]) -> str:
    """Return the bytes of the tensors in MiB, as text."""
    return f"{count_bytes(infos) / 2**20:,.1f} MiB"


def write_passthrough(
    folder: Path,
    infos: Iterable[TensorInfo],
    read: Callable[[str], torch.Tensor],
    written: Callable[[int], None] | None = None,
) -> Path:
    """Write passthrough tensors into `folder`, which nobody reads yet, one at a time, with a manifest. Returns the
    file. read: a tensor by its name."""
    file = folder / PASSTHROUGH_NAME
    # Wider elements first, so that each tensor is aligned in the file
    aligned = sorted(infos, key=lambda info: -info.dtype.itemsize)
    with HashedFile(file) as stream:
        write_safetensors_to(stream, str(file), aligned, read=lambda info: read(info.name), written=written)
        write_manifest(folder, {PASSTHROUGH_NAME: stream.finish()})
    return file


def has_passthrough(config: PretrainedConfig, wrapper: Wrapper | None) -> bool:
    """Return whether a pipeline checkpoint with this config.json has a passthrough file."""
    return wrapper is not None or bool(getattr(config, PASSTHROUGH_TENSORS, 0))


def list_passthrough(folder: Path) -> list[TensorInfo]:
    """Return the tensors in the folder's passthrough file. Raises UserError when it is missing or damaged."""
    file = folder / PASSTHROUGH_NAME
    if not file.is_file():
        raise UserError(
            f"{file} is missing: the tensors that training does not change (a vision tower, layers that predict "
            "further tokens) are in that file; copy it from where the folder was made, or convert the model again"
        )
    opened = open_safetensors(file)
    return [describe_tensor(name, opened.get_tensor(name)) for name in opened.keys()]


def read_passthrough(folder: Path, name: str) -> torch.Tensor:
    """Return one tensor of the folder's passthrough file, memory-mapped."""
    return open_safetensors(folder / PASSTHROUGH_NAME).get_tensor(name)


def describe_tensor(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Return what a checkpoint's index needs of a tensor: name, shape and dtype."""
    return TensorInfo(name, tuple(tensor.shape), tensor.dtype)
