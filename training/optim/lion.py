"""Lion (2302.06675): the sign of an average of gradients, and half of AdamW's state.

torch has none; bitsandbytes' needs a GPU to be fast, and DeepSpeed's compiles its kernels on first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from training.optim.elementwise_update import ElementwiseOptimizer, scale_last

NUM_BUFFERS = 1  # in fp32, of one chunk: the average with the gradient


class Lion(ElementwiseOptimizer):
    """With c = beta1 m + (1 - beta1) g: w <- w - lr (sign(c) + weight_decay w), then m <- beta2 m + (1 - beta2) g.

    betas: beta1 of the update, beta2 of the average. compiles: as in `ElementwiseOptimizer`.
    """

    elementwise = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        compiles: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, _update, compiles)

    def start_state(self, weights: torch.Tensor) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(weights)}

    def choose_rates(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        lr = group["lr"]
        return {"lr": lr, "kept": 1 - lr * group["weight_decay"]}, {"betas": tuple(group["betas"])}


def _update(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    lr: Any,
    kept: Any,
    betas: tuple[float, float],
) -> None:
    """kept: the share of a weight that decay leaves. lr, kept: numbers or, compiled, tensors of one."""
    sign = exp_avg.lerp(gradient, 1 - betas[0]).sign_()
    scaled, factor = scale_last(sign, lr)
    weights.mul_(kept).add_(scaled, alpha=-factor)
    exp_avg.lerp_(gradient, 1 - betas[1])
