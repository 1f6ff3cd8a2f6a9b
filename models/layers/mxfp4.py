"""Matrices in mxfp4 (OCP Microscaling 1.0), as gpt-oss publishes them: 4 bits (e2m1) a number, and one power of two for
32 of them."""

from __future__ import annotations

import torch

# Twice the numbers of 4 bits by their code, and the two of a byte, its low half first: [256, 2]
_DOUBLED = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
DOUBLED_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=1)
WORK_BYTES = 2.0  # of a number that is dequantized, besides the result: its byte as an index, int32
HAS_PROJECTIONS = False  # what is published has experts alone in it


def count_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix."""
    return rows * columns // 2 + rows * columns // 32


def dequantize(parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return matrices [E, R, C] in `dtype`, each number computed in fp32 and rounded once.

    parts: uint8 [E, C, R / 32, 16] and uint8 exponents [E, C, R / 32]: the transposed matrices. shape: R and C.
    """
    codes, exponents = parts
    pairs = DOUBLED_PAIRS.to(device=codes.device, dtype=dtype)
    wide = pairs.index_select(0, codes.flatten().int()).view(*exponents.shape, 32)
    wide.mul_((exponents.float() - 128).exp2().unsqueeze(-1))  # halves of the powers: 2**128 is beyond fp32
    return wide.view(len(codes), shape[1], shape[0]).transpose(1, 2)
