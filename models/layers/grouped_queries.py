"""`attn_implementation=sdpa` where queries share heads of keys and values: which kernel takes them as they are.

On a GPU torch tries cuDNN, flash, memory-efficient attention and plain products, in an order of its own (2.13,
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Flash and cuDNN take grouped queries (`enable_gqa`), but only in
bf16 and fp16 and from compute capability 8.0 on. The memory-efficient kernel takes fp32 and older GPUs, but not grouped
queries there; plain products would write T x T scores. So keys and values are repeated for it.

`transformers` looks attention up by name (`AttentionInterface`); importing this replaces its own function for `sdpa`.

B micro-batch, T sequence, H query heads, G heads of keys and values, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_FLASH_CAPABILITY = 8  # compute capability 8.0: A100, RTX 30


@dataclass(frozen=True)
class _Ungrouped:
    """An attention module whose queries share nothing, as `sdpa_attention_forward` reads it."""

    is_causal: bool


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as an attention function of `transformers`: query [B, H, T, E], key and value [B, G, T, E];
    returns [B, T, H, E]. With a mask `transformers` repeats keys and values by itself."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and attention_mask is None and not takes_groups(query):
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        module = _Ungrouped(getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def takes_groups(query: torch.Tensor) -> bool:
    """Return whether a fused kernel takes grouped queries of this dtype on their device. Others than a GPU's do."""
    if not query.is_cuda:
        return True
    is_low = query.dtype in (torch.bfloat16, torch.float16)
    return is_low and torch.cuda.get_device_capability(query.device)[0] >= _FLASH_CAPABILITY


AttentionInterface.register("sdpa", attend)
