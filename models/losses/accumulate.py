"""Products that are added to a sum of higher precision, such as gradients of weights in bf16 to their sums in fp32."""

from __future__ import annotations

from functools import cache

import torch

_DEVICES = ("cuda",)  # whose addmm may take factors of 16 bits and a sum of 32


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the matrix product of left [n, k] and right [k, m] to `total` [n, m], in place.

    Where `total` is fp32 and the factors are bf16 or fp16, a GPU does that in one operator (torch 2.13, `addmm` with
    `out_dtype`), which neither rounds the product to their dtype nor writes and reads it. Elsewhere the product is
    rounded first, as autograd does.
    """
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    elif total.dtype is torch.float32 and _sums_in_fp32(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


@cache
def _sums_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `addmm` of the device takes factors of `dtype` and a sum in fp32: torch 2.8 has the operator and
    refuses such a sum."""
    if device.type not in _DEVICES:
        return False
    total, factor = (torch.zeros(16, 16, dtype=each, device=device) for each in (torch.float32, dtype))
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
