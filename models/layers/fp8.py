"""Matrices in fp8 (float8_e4m3fn) with an fp32 scale for each block, as DeepSeek-V3 publishes them (2412.19437)."""

from __future__ import annotations

import torch

BLOCK = (128, 128)  # rows and columns of a block in what is published
WORK_BYTES = 0.0  # of a number that is dequantized, besides the result


def count_bytes(numel: int) -> int:
    """Return the bytes of a matrix of `numel` numbers in blocks of the published size."""
    return numel + 4 * -(-numel // (BLOCK[0] * BLOCK[1]))


def dequantize(parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return matrices [E, R, C] in `dtype`, each number computed in fp32 and rounded once.

    parts: float8_e4m3fn [E, R, C] and fp32 scales [E, rows of blocks, columns of blocks], all blocks whole. shape: R
    and C.
    """
    codes, scales = parts
    across, along = scales.shape[1:]
    wide = codes.to(dtype)  # exact in 16 bits
    wide.view(-1, across, shape[0] // across, along, shape[1] // along).mul_(scales[:, :, None, :, None])
    return wide
