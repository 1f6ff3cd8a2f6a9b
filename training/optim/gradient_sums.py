"""How gradients are accumulated over micro-batches: the interface between passes and what sums their gradients, and the
sum in fp32 where the gradients themselves are not (bf16).

One function does that, whatever computed the gradient. It has two callers: a hook on each parameter
(`training/engine/zero_patches.py`), as soon as autograd has computed its gradient, which is then freed, so that a stage
never holds a second set of gradients; and a sweep after each backward pass (`training/engine/deepspeed_sums.py`), for a
gradient that no hook has seen. One that is assigned, as torch's split backward does (2.13,
torch/distributed/pipelining/_backward.py), would otherwise be lost.

In fp32 and fp16 autograd itself adds to `.grad`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from training.pipeline.module import StageModule


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


class Half(Enum):
    """A whole backward pass, or one of the two halves into which a schedule splits it."""

    both = "both"
    inputs = "inputs"
    weights = "weights"


class GradientSums(ABC):
    """Sums the gradients of a step's micro-batches, and hands the sums to the optimizer.

    `start_step`, then `start_pass` and `finish_pass` around each backward pass; after the last one `share_tied` and
    `reduce`. optimizer: DeepSpeed's, around torch's.
    """

    def __init__(self, module: StageModule, optimizer: Any) -> None:
        self._module, self._optimizer = module, optimizer

    def start_step(self) -> None:
        """Prepare for the first pass of a step."""
        self._optimizer.clear_backward_seen_flag()  # at a step's first pass: the last step's gradients are gone

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times its scale (fp16)."""
        return self._optimizer.scale_if_loss(loss)

    @abstractmethod
    def start_pass(self, chunk: int, half: Half) -> None:
        """Prepare for the gradients of a backward pass, or of one of its halves, through `chunk`."""

    @abstractmethod
    def add(self, parameter: torch.nn.Parameter) -> None:
        """Add `parameter.grad`, which is complete for this pass and which no hook of autograd has seen."""

    @abstractmethod
    def finish_pass(self) -> None:
        """Add what has not been added of the pass."""

    def share_tied(self) -> None:
        """Sum the gradients of weights that stages share."""
        for weight, group in self._module.get_tied_weights_and_groups():
            gradient = self._find_sum(weight)
            if gradient is not None:
                dist.all_reduce(gradient, group=group)

    def _find_sum(self, weight: torch.nn.Parameter) -> torch.Tensor | None:
        """The summed gradient of a weight, to be changed in place. In bf16 the optimizer keeps it in `grad_accum`
        where it is offloaded (0.19.8, zero/stage_1_and_2.py)."""
        accumulated = getattr(weight, "grad_accum", None)
        return weight.grad if accumulated is None else accumulated

    @abstractmethod
    def reduce(self) -> None:
        """Average the sums over replicas, where the optimizer finds them."""
