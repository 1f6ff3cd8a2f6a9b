"""nf4 in stacks: each matrix has the numbers that bitsandbytes gives it alone, in any run of matrices."""

from __future__ import annotations

import pytest
import torch

from models.layers.nf4 import NF4_BYTES, count_bytes, dequantize, quantize

functional = pytest.importorskip("bitsandbytes.functional")
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(64, 256), (48, 80), (7, 9), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_of_matrices_is_that_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The sizes fill the last block of 64 numbers, and the last group of 256 blocks, or do not."""
    stack = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = quantize(stack, CPU)
    assert sum(part.nbytes for part in parts) == 5 * count_bytes(*shape)
    expected = torch.stack(
        [
            functional.dequantize_4bit(
                *functional.quantize_4bit(matrix.reshape(-1, 1), quant_type="nf4", compress_statistics=True)
            ).view(shape)
            for matrix in stack
        ]
    )
    assert dequantize(parts, shape, dtype).dtype is dtype
    for start, stop in ((0, 5), (1, 2), (3, 5)):
        assert torch.equal(dequantize(tuple(part[start:stop] for part in parts), shape, dtype), expected[start:stop])


def test_the_bytes_of_large_matrices() -> None:
    """An expert of DeepSeek-V3 has whole groups of blocks."""
    assert count_bytes(4096, 7168) == pytest.approx(NF4_BYTES * 4096 * 7168, rel=1e-6)
