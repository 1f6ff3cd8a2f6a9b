"""Flat tensors a piece at a time, so that what an update computes in between takes a bounded share of the memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

PIECE = 2**24  # elements: 64 MiB in fp32


def split_flat(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same piece of each of `tensors`, which have as many elements; views of those that are contiguous."""
    yield from zip(*(tensor.reshape(-1).split(PIECE) for tensor in tensors), strict=True)


def count_buffer_bytes(num_elements: int, num_buffers: int) -> int:
    """What so many fp32 buffers of a piece take in an update of so many elements."""
    return 4 * num_buffers * min(num_elements, PIECE)
