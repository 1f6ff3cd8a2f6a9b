"""LoRA (2106.09685) on a projection with its last product added into the projection's own output: one `addmm`, which
scales and adds as it multiplies.

peft computes `base(x) + lora_B(lora_A(x)) * scaling` operator by operator. That writes two more tensors as large as the
output, reads four, and multiplies one as large in the backward pass, where each is a matter of memory bandwidth alone.
Here the sum is the only further tensor of that size; gradients follow from autograd, which scales the small side.

N rows, r the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import nn

from models.adapters.base_inits import get_start


class FusedLinear(lora.Linear):
    """peft's projection with an adapter, its last product fused where it is a plain one."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute base(x) + scaling * (B A - B0 A0) x, B0 A0 as `models/adapters/base_inits.py` says, mostly zero; as
        peft does where something else is asked for."""
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        is_fused = not args and not kwargs and _is_plain(self)
        output = self._add_adapter(x) if is_fused else super().forward(x, *args, **kwargs)
        start = get_start(self)
        if start is None:
            return output
        first, second = start  # without dropout: for peft it is a part of the base weight
        (name,) = self.active_adapters
        return _add_product(output, nn.functional.linear(x.to(first.dtype), first), second, -self.scaling[name])

    def _add_adapter(self: Any, x: torch.Tensor) -> torch.Tensor:
        (name,) = self.active_adapters
        first, second = self.lora_A[name], self.lora_B[name]
        low_rank = first(self.lora_dropout[name](x.to(first.weight.dtype)))  # [..., r]
        return _add_product(self.base_layer(x), low_rank, second.weight, self.scaling[name])


def _add_product(output: torch.Tensor, low_rank: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return output [..., outputs] + scaling * low_rank [..., r] times the transpose of weight [outputs, r]."""
    if output.dtype != weight.dtype:
        return (output + nn.functional.linear(low_rank, weight) * scaling).to(output.dtype)
    rows = torch.addmm(output.flatten(0, -2), low_rank.flatten(0, -2), weight.t(), alpha=scaling)  # [N, outputs]
    return rows.view(output.shape)


def _is_plain(adapted: Any) -> bool:
    """Return whether the adapter is plain LoRA whose B no other code has replaced, as a split backward pass does."""
    (name,) = adapted.active_adapters
    second = adapted.lora_B[name]
    is_linear = type(second) is nn.Linear and second.bias is None
    return is_linear and "forward" not in vars(second) and name not in adapted.lora_variant


def fuse_products(module: nn.Module) -> None:
    """Make peft's wrappers around the projections of a layer, quantized or not, add their product into the projection's
    output."""
    for wrapper in module.modules():
        if type(wrapper) is lora.Linear:
            wrapper.__class__ = FusedLinear
