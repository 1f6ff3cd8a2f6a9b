"""Writes safetensors one tensor at a time; `safetensors.torch.save_file` needs a whole shard in memory.

The format: eight bytes with the header's length (little-endian), a JSON header with each tensor's dtype, shape and
offsets, then the bytes. https://github.com/huggingface/safetensors#format. Only for little-endian machines, as torch's
are in practice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from errors import UserError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's name, shape and dtype, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(infos: Iterable[TensorInfo], max_shard_size: int) -> list[list[TensorInfo]]:
    """Split the tensors, in their order, into shards of at most `max_shard_size` bytes; a tensor is never split."""
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if shards[-1] and size + info.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += info.nbytes
    return shards


def name_shards(count: int) -> list[str]:
    """Return the file names that transformers looks for."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def build_index(shards: Sequence[Sequence[TensorInfo]]) -> dict[str, object]:
    """Return the content of `model.safetensors.index.json`."""
    names = name_shards(len(shards))
    return {
        "metadata": {"total_size": sum(info.nbytes for shard in shards for info in shard)},
        "weight_map": {info.name: name for name, shard in zip(names, shards, strict=True) for info in shard},
    }


def write_safetensors(
    file: Path,
    infos: Sequence[TensorInfo],
    read: Callable[[TensorInfo], torch.Tensor],
    written: Callable[[int], None] | None = None,
) -> None:
    """Write `read(info)` for each tensor in turn, keeping one in memory; `written` is called with the bytes of each.

    Raises UserError for a dtype that the format does not have.
    """
    with file.open("wb") as stream:
        write_safetensors_to(stream, str(file), infos, read=read, written=written)


class Writable(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


def write_safetensors_to(
    stream: Writable,
    name: str,
    infos: Sequence[TensorInfo],
    *,
    read: Callable[[TensorInfo], torch.Tensor],
    written: Callable[[int], None] | None = None,
) -> None:
    """Write as `write_safetensors` to anything with `write`; `name` is the file's, for errors."""
    stream.write(_build_header(name, infos))
    for info in infos:
        tensor = read(info)
        assert tuple(tensor.shape) == info.shape and tensor.dtype == info.dtype, f"{info} changed while it was written"
        stream.write(get_bytes(tensor))
        if written is not None:
            written(info.nbytes)


def get_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the raw bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _build_header(file: str, infos: Sequence[TensorInfo]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in infos:
        if info.dtype not in DTYPE_NAMES:
            raise UserError(
                f"{file}: safetensors has no name for the dtype {info.dtype} of '{info.name}'; pass --dtype"
            )
        header[info.name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
