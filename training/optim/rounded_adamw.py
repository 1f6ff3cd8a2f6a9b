"""AdamW (1711.05101) whose two averages are kept in bf16: half of the state.

An update is computed in fp32, from averages that are rounded to the nearest bf16 after it; the weights stay in fp32.
Rounding is not stochastic, so a step is the same wherever it runs, and a run resumes with the bits that it saved. The
price: an average that moves by less than half of a bf16 step (0.2 to 0.4%) does not change. With betas up to 0.996 no
average can get stuck above the values it averages, and larger ones are refused (training/config/validate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from training.optim.elementwise_update import ElementwiseUpdate, scale_last

NUM_BUFFERS = 2  # in fp32: one for each average


class RoundedAdamW(torch.optim.Optimizer):
    """torch's AdamW, except that `exp_avg` and `exp_avg_sq` are bf16. compiles: make one kernel of an update."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        compiles: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = ElementwiseUpdate(_update, compiles)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weights, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(weights, dtype=torch.bfloat16)
                state["step"] += 1
                lr, (beta1, beta2) = group["lr"], group["betas"]
                self._update(
                    weights,
                    weights.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    scalars={
                        "step_size": lr / (1 - beta1 ** state["step"]),
                        "correction": 1 - beta2 ** state["step"],
                        "kept": 1 - lr * group["weight_decay"],
                    },
                    constants={"rates": (beta1, beta2, group["eps"])},
                )


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
    first = exp_avg.float().lerp_(gradient, 1 - beta1)
    second = exp_avg_sq.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    root = second.div_(correction).sqrt_().add_(eps)
    scaled, factor = scale_last(first, step_size)
    weights.mul_(kept).addcdiv_(scaled, root, value=-factor)
