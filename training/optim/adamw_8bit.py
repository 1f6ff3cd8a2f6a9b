"""AdamW in 8 bits (2110.02861), that of bitsandbytes, for parameters of any size.

Its CUDA kernels take the number of elements as a 32-bit integer (0.50.2, backends/cuda/ops.py:1207): from 2^31 on it
wraps silently, and elements are left out of the update. ZeRO flattens a parameter group into one tensor, so a rank with
2.1 billion parameters is there.

Importing this module imports bitsandbytes, which takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bitsandbytes import optim

from training.optim.state_kinds import BLOCK_SIZE

MAX_ELEMENTS = 2**30  # of one call; a multiple of BLOCK_SIZE


class AdamW8bit(optim.AdamW8bit):
    """Updates a parameter in views of at most `MAX_ELEMENTS`. Each block is updated by itself, so the results are
    bit-identical to those of a single call."""

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        if p.numel() <= MAX_ELEMENTS:
            super().update_step(group, p, gindex, pindex)
            return
        state = self.state[p]
        for view, view_state in split_parameter(p, state):
            self.state[view] = view_state
            super().update_step(group, view, gindex, pindex)
            del self.state[view]
        state["step"] += 1


def split_parameter(p: torch.Tensor, state: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yields flat views of `p`, which is contiguous and has a gradient, each with its part of the gradient and of the
    optimizer state."""
    assert p.grad is not None
    gradients = p.grad.view(-1).split(MAX_ELEMENTS)
    parts = {name: state[name].view(-1).split(MAX_ELEMENTS) for name in ("state1", "state2")}
    parts |= {name: state[name].split(MAX_ELEMENTS // BLOCK_SIZE) for name in ("absmax1", "absmax2")}
    for number, view in enumerate(p.detach().view(-1).split(MAX_ELEMENTS)):
        view.grad = gradients[number]
        yield view, state | {name: views[number] for name, views in parts.items()}
