"""The loss of several tokens ahead (multi-token prediction, 2412.19437, equations 24 and 25): what is reported stays
that of the next token, and the gradient is that of

    loss + coef / K * (loss_1 + ... + loss_K)

loss_k is a mean over the targets of depth k in the global batch, which are fewer than those of the next token: its
denominator travels with its targets, as that of the loss itself does.

B micro-batch, T sequence, D hidden, V vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from batch import Targets
from models.losses.metric_sums import MetricSums
from models.losses.token_loss import TokenLoss


class FurtherTokenLoss:
    """The loss of the last stage of a model with layers that predict further tokens."""

    def __init__(self, next_token: TokenLoss, coef: float, num_depths: int) -> None:
        """next_token: the loss of the next token."""
        self._next_token, self._coef, self._num_depths = next_token, coef, num_depths
        self._further = next_token.without_terms()
        self._own_sums = MetricSums(*(f"mtp_loss_{depth}" for depth in range(1, 1 + num_depths)))

    @property
    def sums(self) -> Sequence[MetricSums]:
        """The losses of further tokens, means over the targets of each depth, and the metrics of the next token."""
        return [self._own_sums, *self._next_token.sums]

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return the loss of the next token of one micro-batch.

        outputs: hidden_states [(1 + K) B, T, D], those of a depth after those of the one before it; head weight [V, D].
        targets: as in `causal_lm_loss`, with those of each depth.
        """
        hidden_states, weight = outputs
        blocks = hidden_states.chunk(1 + self._num_depths)
        loss = self._next_token((blocks[0], weight), targets)
        losses = [
            self._further((block, weight), depth_targets)
            for block, depth_targets in zip(blocks[1:], targets.further, strict=True)
        ]
        self._count(losses, targets.further)
        if not torch.is_grad_enabled():
            return loss
        return _WithGradient.apply(loss, torch.stack(losses).mean(), self._coef)

    def _count(self, losses: list[torch.Tensor], further: Sequence[Targets]) -> None:
        sums = [loss.detach().double() * each.denominator for loss, each in zip(losses, further, strict=True)]
        counts = [each.indices.new_full((), len(each.indices), dtype=torch.float64) for each in further]
        self._own_sums.add(torch.stack(sums), torch.stack(counts))


class _WithGradient(torch.autograd.Function):
    """A loss, unchanged, whose gradient is that of the loss plus `coef` times another."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, other: torch.Tensor, coef: float) -> torch.Tensor:
        context.coef = coef
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, gradient * context.coef, None
