"""`flash_kernels=fa3`: FlashAttention-3 in place of FlashAttention-2, which torch brings along.

torch registers it under the operators of its own (`torch.nn.attention.activate_flash_attention_impl`), so all that call
them run on it: `scaled_dot_product_attention`, `varlen_attn` and the blocks of a ring (`models/parallel`). Its kernels
are made for Hopper, in bf16 and fp16, and have no dropout (2.13, torch/nn/attention/_fa3.py).
"""

from __future__ import annotations

import torch
from torch.nn.attention import activate_flash_attention_impl
from transformers import PretrainedConfig

from models.layers.packed_attention import has_dropout

PACKAGE = "flash_attn_interface"
_CAPABILITY = 9  # compute capability 9.0: H100, H200


def find_obstacle(config: PretrainedConfig) -> str | None:
    """Return why a model cannot run it on the GPU of this process; None where it can."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _CAPABILITY:
        return "its kernels need a GPU of compute capability 9.0, an H100 or H200"
    return "its kernels have no dropout, and the model's config states one" if has_dropout(config) else None


def use_flash_attention_3(spared: int) -> None:
    """Run all flash attention of this process on it from now on.

    spared: multiprocessors that its kernels leave free. They stay on a multiprocessor until all is done, and a transfer
    that is launched meanwhile would have none.
    """
    activate_flash_attention_impl("FA3")
    torch._C._set_sm_carveout_experimental(spared or None)
