"""Lets a layer's passes run on the meta device, on tensors without storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.layers.packed_attention import FLASH


class WithoutData(TorchFunctionMode):
    """Lets forward and backward pass run on the meta device.

    Attention keeps what the fused kernels keep (meta would choose the one that saves T x T probabilities; the package
    of flash attention may be missing on the machine that plans), and a question about values, such as "is no row
    packed?" in the masks of `transformers`, is answered with yes.
    """

    def __enter__(self) -> WithoutData:
        for name in FLASH:
            ALL_ATTENTION_FUNCTIONS[name] = _attend_flash
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in FLASH:
            del ALL_ATTENTION_FUNCTIONS[name]  # the library's own is there again

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return FusedAttention.apply(*args[:3], (kwargs or {}).get("attn_mask"))
        if function is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return function(*args, **(kwargs or {}))


def _attend_flash(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Stands for `transformers`' `flash_attention_forward`, which pads values to the size of the queries."""
    size = value.shape[-1]
    output = FusedAttention.apply(query, key, F.pad(value, (0, query.shape[-1] - size)), None)
    return output.transpose(1, 2)[..., :size], None


class FusedAttention(torch.autograd.Function):
    """Saves the tensors that FlashAttention saves (2205.14135, algorithm 2): query, key, value, output, and one fp32
    number per row. A mask is saved by each layer, as the kernels take it: in the dtype of the queries
    (`convert_boolean_attn_mask` of torch's `attention.cpp`)."""

    is_running = False

    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        FusedAttention.is_running = True
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # the kernels' own memory order
        row_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        FusedAttention.is_running = False
        masks = [] if mask is None else [mask.to(query.dtype)]
        context.save_for_backward(query, key, value, output, row_sums, *masks)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return *(torch.empty_like(tensor) for tensor in context.saved_tensors[:3]), None
