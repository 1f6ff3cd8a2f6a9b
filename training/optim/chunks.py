"""Flat tensors in chunks, so that the intermediate results of an optimizer update take a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_SIZE = 2**24  # elements: 64 MiB in fp32


def split_flat(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same chunk of each of `tensors`, which have the same number of elements; views of contiguous ones."""
    yield from zip(*(tensor.reshape(-1).split(CHUNK_SIZE) for tensor in tensors), strict=True)


def count_buffer_bytes(num_elements: int, num_buffers: int) -> int:
    """Return the bytes of `num_buffers` fp32 buffers of one chunk, in an update of `num_elements` elements."""
    return 4 * num_buffers * min(num_elements, CHUNK_SIZE)
