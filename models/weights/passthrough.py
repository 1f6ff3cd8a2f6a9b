"""Passthrough tensors: those of a wrapped model outside its text model, in one file next to config.json that keeps
their names on disk, their dtypes and their bits.

A converted folder has it, and a run's `checkpoints/`, once for all steps: training changes none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from errors import UserError
from filesystem import sync_to_disk
from models.storage.safetensors_writer import TensorInfo, write_safetensors
from models.storage.tensor_files import open_safetensors
from models.weights.source import WeightSource

PASSTHROUGH_NAME = "carried.safetensors"


def write_passthrough(source: WeightSource, folder: Path, written: Callable[[int], None] | None = None) -> Path:
    """Copy the passthrough tensors of `source` into `folder`, one at a time, and return the file. It appears complete
    or not at all."""
    file = folder / PASSTHROUGH_NAME
    temporary = file.with_suffix(".tmp")
    # Wider elements first, so that each tensor is aligned in the file
    infos = sorted(source.list_passthrough(), key=lambda info: -info.dtype.itemsize)
    write_safetensors(temporary, infos, read=lambda info: source.read_passthrough(info.name), written=written)
    sync_to_disk(temporary)
    os.replace(temporary, file)
    sync_to_disk(folder)
    return file


def list_passthrough(folder: Path) -> list[TensorInfo]:
    """Return the tensors in the folder's passthrough file. Raises UserError when it is missing or damaged."""
    file = folder / PASSTHROUGH_NAME
    if not file.is_file():
        raise UserError(
            f"{file} is missing: config.json wraps a text model, and the other tensors (such as the vision tower) are "
            "in that file; copy the file from where the folder was made, or convert the model again"
        )
    opened = open_safetensors(file)
    return [describe_tensor(name, opened.get_tensor(name)) for name in opened.keys()]


def read_passthrough(folder: Path, name: str) -> torch.Tensor:
    """Return one tensor of the folder's passthrough file, memory-mapped."""
    return open_safetensors(folder / PASSTHROUGH_NAME).get_tensor(name)


def describe_tensor(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Return what a checkpoint's index needs of a tensor: name, shape and dtype."""
    return TensorInfo(name, tuple(tensor.shape), tensor.dtype)
