"""How a micro-batch's gradients enter the sums of a step, where those are in fp32 and gradients are not (bf16).

Through one function, whatever made the gradient. Two things call it (`training/engine/zero_patches.py`): a hook on each
parameter, the moment autograd has made its gradient, which is then freed, so that a stage never holds a second set of
gradients; and a sweep after each backward pass, for a gradient that no hook has seen. One that is assigned, as torch's
split backward does (2.13, torch/distributed/pipelining/_backward.py), would otherwise be lost.

In fp32 and fp16 autograd itself adds to `.grad`.
"""

from __future__ import annotations

import torch


def add_gradient(parameter: torch.nn.Parameter, total: torch.Tensor | None, is_first: bool = False) -> torch.Tensor:
    """Adds the gradient of `parameter` to `total`, its sum in fp32, and frees it. Returns the sum.

    total: as many elements as the parameter, in any shape; None before the first micro-batch, unless there is a place
    for it: then is_first says that what `total` holds is not to be read. A GPU casts while it adds, and so needs no
    copy of the gradient in fp32; the result is the same to the bit.
    """
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if total is None:
        return gradient.to(torch.float32)
    gradient = gradient.reshape(total.shape)
    return total.copy_(gradient) if is_first else total.add_(gradient)
