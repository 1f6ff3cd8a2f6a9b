"""Matrices in int4 in groups of 32, as compressed-tensors packs them and Kimi K2 Thinking is published: 4 bits (a whole
number from -8 to 7) a number, and a scale for 32 of them."""

from __future__ import annotations

import torch

GROUP = 32  # numbers of a row that share a scale
# The numbers by their code, and the two of a byte, its low half first: [256, 2]
_NUMBERS = torch.arange(-8.0, 8.0)
PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=1)
WORK_BYTES = 2.0  # of a number that is dequantized, besides the result: its byte as an index, int32
HAS_PROJECTIONS = False  # what is published has experts alone in it


def count_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix, with scales of 16 bits."""
    return rows * columns // 2 + 2 * rows * (columns // GROUP)


def dequantize(parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return matrices [E, R, C] in `dtype`, each number computed in fp32 and rounded once.

    parts: int32 [E, R, C / 8], the lowest bits first, and scales [E, R, C / 32]. shape: R and C.
    """
    codes, scales = parts
    pairs = PAIRS.to(device=codes.device, dtype=dtype)
    wide = pairs.index_select(0, codes.view(torch.uint8).flatten().int()).view(*scales.shape, GROUP)
    return wide.mul_(scales.unsqueeze(-1)).view(len(codes), *shape)
