"""CUDA's `addmm` of factors in 16 bits to a sum in fp32, played on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import library as operators

from models.losses import accumulate


@contextmanager
def play_mixed_addmm(takes_fp32_sums: bool = True) -> Iterator[list[tuple[int, ...]]]:
    """Within it the CPU has the operator. Yields the shapes of the sums that it adds to. takes_fp32_sums: as torch 2.13
    does; torch 2.8 wants sums of the factors' dtype."""
    shapes: list[tuple[int, ...]] = []

    def add(
        total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype,
        *, beta: float = 1, alpha: float = 1, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        assert left.dtype is right.dtype and left.dtype in (torch.bfloat16, torch.float16) and beta == alpha == 1
        if not takes_fp32_sums and total.dtype is not left.dtype:
            raise RuntimeError("self and mat2 must have the same dtype")
        assert out_dtype is total.dtype is out.dtype is torch.float32 and out.data_ptr() == total.data_ptr()
        shapes.append(tuple(out.shape))
        return out.add_(left.float() @ right.float())

    accumulate._sums_in_fp32.cache_clear()
    try:
        with (
            operators._scoped_library("aten", "IMPL") as library,
            patch.object(accumulate, "_DEVICES", ("cpu",)),
        ):
            library.impl("addmm.dtype_out", add, "CPU")
            accumulate._sums_in_fp32(torch.device("cpu"), torch.bfloat16)  # the probe
            shapes.clear()
            yield shapes
    finally:
        accumulate._sums_in_fp32.cache_clear()
