"""Next-token cross entropy as a run uses it: smoothed labels in training; in evaluation the plain loss and the number
of correctly predicted tokens.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from batch import Targets
from models.losses.cross_entropy import causal_lm_loss, get_softcap
from models.losses.logit_chunks import shard_vocabulary
from models.parallel.shard import NO_TP, TensorParallel


class TokenLoss:
    """The loss of the last stage. Without gradients it also counts correct tokens, until `take_totals` takes the
    counts."""

    def __init__(
        self,
        config: PretrainedConfig,
        label_smoothing: float = 0.0,
        *,
        counts_correct: bool = False,
        parallel: TensorParallel = NO_TP,
    ) -> None:
        """label_smoothing: see `causal_lm_loss`; used in training only, so that evaluation losses stay comparable."""
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._label_smoothing, self.counts_correct = label_smoothing, counts_correct
        self._totals: torch.Tensor | None = None

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Compute `causal_lm_loss` of one micro-batch, with labels smoothed in training."""
        trains = torch.is_grad_enabled()
        correct = None if trains or not self.counts_correct else outputs[0].new_zeros((), dtype=torch.int64)
        loss = causal_lm_loss(
            outputs,
            targets,
            self._softcap,
            self._sharing,
            label_smoothing=self._label_smoothing if trains else 0.0,
            num_correct=correct,
        )
        if correct is not None:
            totals = torch.stack([correct, (targets.ids >= 0).sum()])
            self._totals = totals if self._totals is None else self._totals + totals
        return loss

    def take_totals(self) -> torch.Tensor | None:
        """Return (correct targets, targets) of the evaluation since the last call: int64 [2]; None without one."""
        totals, self._totals = self._totals, None
        return totals
