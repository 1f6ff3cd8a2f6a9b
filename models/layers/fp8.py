"""Matrices in fp8 (float8_e4m3fn) with an fp32 scale for each block, as DeepSeek-V3 publishes them (2412.19437)."""

from __future__ import annotations

import torch

BLOCK = (128, 128)  # rows and columns of a block in what is published
WORK_BYTES = 0.0  # of a number that is dequantized, besides the result
HAS_PROJECTIONS = True


def count_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix in whole blocks of the published size."""
    blocks = -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])
    return blocks * (BLOCK[0] * BLOCK[1] + 4)


def dequantize(parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return matrices [E, R, C] in `dtype`, each number computed in fp32 and rounded once.

    parts: float8_e4m3fn in whole blocks, [E, R, C] or with further rows and columns; fp32 scales [E, rows of blocks,
    columns of blocks]. shape: R and C.
    """
    codes, scales = parts
    across, along = scales.shape[1:]
    wide = codes.to(dtype)  # exact in 16 bits
    wide.view(-1, across, codes.shape[1] // across, along, codes.shape[2] // along).mul_(scales[:, :, None, :, None])
    return wide[:, : shape[0], : shape[1]]
