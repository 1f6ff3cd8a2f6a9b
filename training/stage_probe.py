"""Which stage was the first to see a number that is not finite.

Sums are enough: what is not finite in a tensor is not finite in its sum. Each micro-batch adds the sum of the hidden states that a stage hands
on, and of the gradient that comes back for them, to two numbers on the device; they are read only at a step that went wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from training.pipeline import StageModule


class StageProbe:
    """Of this rank's stage. `reset` after each step; all ranks call `find_first` together."""

    def __init__(self, module: StageModule, device: torch.device) -> None:
        self._stage_id, self._last_stage = module.stage_id, module.num_stages - 1
        self._sums = torch.zeros(2, device=device)  # of what goes on, of the gradient that comes back
        module.register_forward_hook(self._see)

    def reset(self) -> None:
        self._sums.zero_()

    def find_first(self) -> str:
        """Where it was seen first, in words: values go from the first stage to the loss, gradients from the loss to the first stage."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self._stage_id, *self._sums.isfinite().tolist()))
        handed_on = sorted(stage for stage, finite, _ in told if not finite)
        came_back = sorted(stage for stage, _, finite in told if not finite)
        if handed_on:
            return f"in the output of stage {handed_on[0]}"
        if not came_back:
            return "in the gradients of weights, or behind them in the backward pass of stage 0"
        return "in the loss" if came_back[-1] == self._last_stage else f"in the backward pass of stage {came_back[-1] + 1}"

    def _see(self, module: StageModule, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            self._sums[0] += outputs[0].detach().sum(dtype=torch.float32)
            outputs[0].register_hook(self._see_gradient)

    def _see_gradient(self, gradient: torch.Tensor) -> None:
        self._sums[1] += gradient.sum(dtype=torch.float32)
