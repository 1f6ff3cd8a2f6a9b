"""How gradients are accumulated over micro-batches in fp32, where the gradients themselves are not (bf16).

One function does it, whatever computed the gradient. It has two callers (`training/engine/zero_patches.py`): a hook on
each parameter, as soon as autograd has computed its gradient, which is then freed, so that a stage never holds a second
set of gradients; and a sweep after each backward pass, for a gradient that no hook has seen. One that is assigned, as
torch's split backward does (2.13, torch/distributed/pipelining/_backward.py), would otherwise be lost.

In fp32 and fp16 autograd itself adds to `.grad`.
"""

from __future__ import annotations

import torch


def add_gradient(parameter: torch.nn.Parameter, total: torch.Tensor | None, is_first: bool = False) -> torch.Tensor:
    """Add the gradient of `parameter` to `total`, its accumulated gradient in fp32, and free it. Returns the total.

    total: as many elements as the parameter, in any shape; None before the first micro-batch, unless it has memory
    already. is_first: `total` is overwritten. A GPU casts while it adds, and so needs no copy of the gradient in fp32;
    the result is the same to the bit.
    """
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if total is None:
        return gradient.to(torch.float32)
    gradient = gradient.reshape(total.shape)
    return total.copy_(gradient) if is_first else total.add_(gradient)
