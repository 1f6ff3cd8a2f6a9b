"""Writes files that `torch.load` reads, at the speed of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from errors import Ending, UserError
from models.storage.safetensors_writer import get_bytes


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in a storage of its own: torch.save writes whole storages, so a view of a mapped file would write
    the whole file."""
    tensor = tensor.detach().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes or tensor.numel() == 0:
        return tensor
    return torch.frombuffer(get_bytes(tensor), dtype=tensor.dtype).reshape(tensor.shape)


def save_torch(content: dict[str, Any], file: Any) -> None:
    """Write `content` to `file`: a path, or anything with `write`.

    Writes without torch's CRC-32, which costs several times the copy and is not checked where files are mapped. Zip
    tools complain about such a file; `torch.load`, mapped or not, and DeepSpeed read it. Raises UserError when it
    cannot be written.
    """
    with without_crc32():
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer hides the errno
            reason = str(error).splitlines()[0]
            raise UserError(f"{file} cannot be written ({reason}); is the disk full?", Ending.DISK) from None


@contextmanager
def without_crc32() -> Iterator[None]:
    """Turn off torch's CRC-32 within the block. The setting is global to the process: use one block around all threads
    that save."""
    with_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(with_crc32)
