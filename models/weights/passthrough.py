"""The tensors of a wrapped model beside its text: one file next to config.json, in which they keep their names on disk,
their dtypes and their bits.

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
    """Copies what `source` carries along into `folder`, one tensor at a time. The file is there whole or not at all."""
    file = folder / PASSTHROUGH_NAME
    temporary = file.with_suffix(".tmp")
    infos = sorted(
        source.list_passthrough(), key=lambda info: -info.dtype.itemsize
    )  # stable; each is aligned in its file
    write_safetensors(temporary, infos, read=lambda info: source.read_passthrough(info.name), written=written)
    sync_to_disk(temporary)
    os.replace(temporary, file)
    sync_to_disk(folder)
    return file


def list_passthrough(folder: Path) -> list[TensorInfo]:
    """What the file of the folder holds. Raises UserError when it is missing or damaged."""
    file = folder / PASSTHROUGH_NAME
    if not file.is_file():
        raise UserError(
            f"{file} is missing: config.json wraps a text model, and what is beside it (such as the vision tower) lies "
            "there; copy the file from where the folder was made, or convert the model again"
        )
    opened = open_safetensors(file)
    return [describe_tensor(name, opened.get_tensor(name)) for name in opened.keys()]


def read_passthrough(folder: Path, name: str) -> torch.Tensor:
    """One tensor of the file, mapped."""
    return open_safetensors(folder / PASSTHROUGH_NAME).get_tensor(name)


def describe_tensor(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), tensor.dtype)
