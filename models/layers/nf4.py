"""Matrices in nf4 with double quantization (QLoRA, 2305.14314), as bitsandbytes makes them.

A block is 64 consecutive numbers of a matrix, 4 bits each, and the largest magnitude among them. Those magnitudes, less
their mean over the matrix, have 8 bits each, and 256 of them an fp32 scale. Every matrix is quantized by itself, so
that any run of the matrices of a stack can be dequantized without the others.

E matrices of R x C numbers, K blocks of a matrix, G groups of 256 blocks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import pad

BLOCK, GROUP = 64, 256  # numbers of a block, blocks of a group
# Bytes of a number: 4 bits, 8 for each block, and 32 for each group
NF4_BYTES = 1 / 2 + (1 + 4 / GROUP) / BLOCK
# Bytes of a number that is dequantized, besides the result: the magnitudes of blocks in fp32
WORK_BYTES = 4 / BLOCK
HAS_PROJECTIONS = True


def count_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix. Its blocks and groups are whole."""
    blocks = -(-rows * columns // BLOCK)
    groups = -(-blocks // GROUP)
    return blocks * BLOCK // 2 + groups * (GROUP + 4) + 4


def quantize(stack: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Quantize matrices [E, R, C] on `device`, one at a time, so that no more than one of them is there unquantized.

    Returns codes uint8 [E, 32 K], magnitudes uint8 [E, 256 G], the scales of those fp32 [E, G], and their means
    fp32 [E].
    """
    parts: list[torch.Tensor] = []
    for number, matrix in enumerate(stack):
        made = _quantize_one(matrix.to(device))
        parts = parts or [part.new_empty(len(stack), *part.shape) for part in made]
        for whole, part in zip(parts, made, strict=True):
            whole[number] = part
    return tuple(parts)


def _quantize_one(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from bitsandbytes.functional import quantize_4bit  # imported on use: it is an optional package

    flat = pad(matrix.reshape(-1), (0, -matrix.numel() % BLOCK))
    codes, state = quantize_4bit(flat, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    magnitudes = pad(state.absmax, (0, -len(state.absmax) % GROUP))
    return codes.flatten(), magnitudes, state.state2.absmax, state.offset


def dequantize(parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return matrices [E, R, C] in `dtype`, fewer than 2^31 numbers, as bitsandbytes' kernels need.

    parts: as `quantize` has made them, or the same run of each. shape: R and C.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

    codes, magnitudes, scales, means = parts
    rows, columns = shape
    in_8_bits = QuantState(scales, code=_get_map(codes.device), blocksize=GROUP, dtype=torch.float32)
    largest = dequantize_blockwise(magnitudes, in_8_bits).add_(means.unsqueeze(1))
    numel = 2 * codes.shape[1]  # of a matrix, with the rest of its last block
    state = QuantState(
        largest[:, : numel // BLOCK].contiguous(),
        shape=torch.Size((len(codes), numel)),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    # As one column: bitsandbytes takes a single row for a matrix that was transposed
    return dequantize_4bit(codes.view(-1, 1), state)[:, : rows * columns].reshape(len(codes), rows, columns)


@cache
def _get_map(device: torch.device) -> torch.Tensor:
    """Return the numbers that 8 bits stand for, fp32 [256]."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)
