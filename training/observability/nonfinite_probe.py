"""The stage in which a number that is not finite appeared first.

Sums are enough: the sum of a tensor is not finite if one of its elements is not. Each micro-batch adds the sum of the
hidden states that a stage sends, and of the gradient that it receives for them, to two numbers on the device. They are
read only after a step that is not finite.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from training.pipeline.module import StageModule


class NonfiniteProbe:
    """The probe of this rank's stage. `reset` after each step; all ranks call `find_first` together."""

    def __init__(self, module: StageModule, device: torch.device) -> None:
        self._stage_id, self._chunk_numbers = module.stage_id, module.chunk_numbers
        # [chunks, 2]: hidden states sent, gradients received
        self._sums = torch.zeros(len(module.chunks), 2, device=device)
        module.register_forward_hook(self._see)

    def reset(self) -> None:
        self._sums.zero_()

    def find_first(self) -> str:
        """Return in words where it appeared first: values flow from the first stage to the loss, gradients from the
        loss to the first stage."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            gathered,
            [
                (chunk, self._name(number), *sums.isfinite().tolist())
                for number, (chunk, sums) in enumerate(zip(self._chunk_numbers, self._sums, strict=True))
            ],
        )
        chunks = [chunk for chunks_of_rank in gathered for chunk in chunks_of_rank]  # with those of replicas
        names = {chunk: name for chunk, name, _, _ in chunks}
        handed_on = [chunk for chunk, _, finite, _ in chunks if not finite]
        came_back = [chunk for chunk, _, _, finite in chunks if not finite]
        if handed_on:
            return f"in the output of {names[min(handed_on)]}"
        if not came_back:
            return f"in the gradients of weights, or after them in the backward pass of {names[0]}"
        last = max(came_back)
        return "in the loss" if last == max(names) else f"in the backward pass of {names[last + 1]}"

    def _name(self, number: int) -> str:
        """number: of a chunk of this stage, counted from 0."""
        return f"stage {self._stage_id}" + (f", chunk {number}" if len(self._sums) > 1 else "")

    def _see(self, module: StageModule, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            sums = self._sums[module.active_chunk]
            sums[0] += outputs[0].detach().sum(dtype=torch.float32)
            outputs[0].register_hook(partial(self._see_gradient, sums))

    def _see_gradient(self, sums: torch.Tensor, gradient: torch.Tensor) -> None:
        sums[1] += gradient.sum(dtype=torch.float32)


def describe_nonfinite(step: int, loss: float, norm: float, *, samples: str, place: str) -> str:
    """Return the message for a step that is not finite. step: from 1. samples: of its global batch, in words. place: of
    `find_first`."""
    return f"step {step}: loss {loss:g}, gradient norm {norm:g}; {samples}; first seen {place}"
