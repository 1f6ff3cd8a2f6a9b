"""torch's fused attention for one block of queries and keys: with the log-sum-exp that blocks are merged by, and with a
backward pass that takes the log-sum-exp and the output of all blocks.

`scaled_dot_product_attention` runs these operators and returns neither. They take whole blocks, in which queries see
all keys, or each those up to its own; no windows, and one document only. On a CPU any of its dtypes; on a GPU flash
attention, so bf16 and fp16.

B micro-batch, H query heads, G heads of keys and values, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_ATEN = torch.ops.aten
_LARGEST_HEAD = 256  # of flash attention; sizes must be multiples of 8

Attended = tuple[torch.Tensor, torch.Tensor]  # output [B, H, l, E], log-sum-exp [B, H, l]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockKernel(NamedTuple):
    """A fused attention kernel. attend: takes query [B, H, l, E], key and value [B, G, m, E], whether a query sees only
    the keys up to its own, and the scale. differentiate: takes the gradient of the output, then query, key, value,
    output and log-sum-exp, and the same two options; returns the gradients of query, key and value."""

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Attended]
    differentiate: Callable[..., Gradients]


def find_kernel(query: torch.Tensor) -> BlockKernel | None:
    """Return the kernel for queries of this dtype and size; None where there is none."""
    if query.device.type == "cpu":
        return BlockKernel(_attend_cpu, _differentiate_cpu)
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in range(8, _LARGEST_HEAD + 1, 8)
    if query.is_cuda and fits and torch.cuda.get_device_capability(query.device)[0] >= 8:
        return BlockKernel(_attend_flash, _differentiate_flash)
    return None


def _attend_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float) -> Attended:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)


def _differentiate_cpu(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, log_sums, 0.0, is_causal, scale=scale
    )


def _attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> Attended:
    return _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[:2]


def _differentiate_flash(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    lengths = None, None, query.shape[2], key.shape[2]  # no documents
    return _ATEN._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, output, log_sums, *lengths, 0.0, is_causal, seed, seed[0], scale=scale
    )
