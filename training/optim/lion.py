"""Lion (2302.06675): the sign of an average of gradients, and half of AdamW's state.

torch has none; bitsandbytes' needs a GPU to be fast, and DeepSpeed's compiles its kernels on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from training.optim.chunks import split_flat

NUM_BUFFERS = 1


class Lion(torch.optim.Optimizer):
    """With c = beta1 m + (1 - beta1) g: w <- w - lr (sign(c) + weight_decay w), then m <- beta2 m + (1 - beta2) g.

    betas: beta1 of the update, beta2 of the average.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights)
                for chunk, gradient, exp_avg in split_flat(weights, weights.grad, state["exp_avg"]):
                    _update(chunk, gradient, exp_avg, group["lr"], group["betas"], group["weight_decay"])


def _update(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    sign = exp_avg.lerp(gradient, 1 - betas[0]).sign_()
    weights.mul_(1 - lr * weight_decay).add_(sign, alpha=-lr)
    exp_avg.lerp_(gradient, 1 - betas[1])
