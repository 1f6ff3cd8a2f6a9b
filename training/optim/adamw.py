"""AdamW (1711.05101), with its averages in fp32, or in bf16: half of the state.

An update is computed in fp32, from averages that are rounded to the nearest bf16 after it; the weights stay in fp32.
Rounding is not stochastic, so a step is the same wherever it runs, and a run resumes with the bits that it saved. The
price: an average that moves by less than half of a bf16 step (0.2 to 0.4%) does not change. With betas up to 0.996 no
average can get stuck above the values it averages, and larger ones are refused (training/config/validate.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from training.optim.elementwise_update import ElementwiseOptimizer, scale_last

NUM_BUFFERS = 2  # in fp32: one for each average


class AdamW(ElementwiseOptimizer):
    """torch's AdamW, whose `exp_avg` and `exp_avg_sq` have the dtype `averages`. compiles: as in
    `ElementwiseOptimizer`."""

    elementwise = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        averages: torch.dtype = torch.float32,
        compiles: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, _update, compiles)
        self._averages = averages

    def start_state(self, weights: torch.Tensor) -> dict[str, Any]:
        # As torch's own where the averages are: a run may continue with either
        step = torch.zeros(()) if self._averages is torch.float32 else 0
        zeros = {name: torch.zeros_like(weights, dtype=self._averages) for name in self.elementwise}
        return {"step": step, **zeros}

    def choose_rates(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        state["step"] += 1
        step, lr, (beta1, beta2) = float(state["step"]), group["lr"], group["betas"]
        scalars = {
            "step_size": lr / (1 - beta1**step),
            "correction": 1 - beta2**step,
            "kept": 1 - lr * group["weight_decay"],
        }
        return scalars, {"rates": (beta1, beta2, group["eps"])}


def _update(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step_size: Any,
    correction: Any,
    kept: Any,
    rates: tuple[float, float, float],
) -> None:
    """step_size: the learning rate over the first average's correction; correction: the second's; kept: the share of a
    weight that decay leaves. All three are numbers or, compiled, tensors of one. rates: both betas, and eps."""
    beta1, beta2, eps = rates
    first = exp_avg.to(torch.float32, copy=True).lerp_(gradient, 1 - beta1)
    second = exp_avg_sq.to(torch.float32, copy=True).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    root = second.div_(correction).sqrt_().add_(eps)
    scaled, factor = scale_last(first, step_size)
    weights.mul_(kept).addcdiv_(scaled, root, value=-factor)
