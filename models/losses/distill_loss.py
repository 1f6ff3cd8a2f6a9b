"""The losses of a distillation: of the student, next-token cross entropy and the divergence from its teacher; and in
place of the teacher's own loss, the distributions that the student is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from models.losses.cross_entropy import causal_lm_loss, get_softcap
from models.losses.divergence import DistillOptions, Teaching, choose_top, soften
from models.losses.logit_chunks import compute_log_probabilities, list_chunks, shard_vocabulary
from models.parallel.shard import NO_TP, TensorParallel


class DistillLoss:
    """The loss of the student's last stage. It returns the cross entropy; the gradient is that of the whole loss
    (`causal_lm_loss`). It also adds up the metrics of all targets until `take_totals` takes them.

    metrics: the names of what it reports.
    """

    metrics: tuple[str, ...] = ("distill_loss", "token_accuracy")

    def __init__(
        self,
        config: PretrainedConfig,
        distill: DistillOptions,
        label_smoothing: float = 0.0,
        *,
        counts_correct: bool = False,
        parallel: TensorParallel = NO_TP,
    ) -> None:
        """label_smoothing, counts_correct: as those of `TokenLoss`."""
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._distill, self._label_smoothing, self._counts_correct = distill, label_smoothing, counts_correct
        self._totals: torch.Tensor | None = None

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """outputs: as in `causal_lm_loss`. targets: target tokens [B, T]; of the teacher at each of the N targets, in
        their order, tokens [N, k] and log-probabilities [N, k + 1], as `Teaching` takes them; `loss_denominator`,
        scalar; and `target_indices` [N], see `find_targets`."""
        target_ids, token_ids, log_probabilities, *rest = targets
        trains = torch.is_grad_enabled()
        counts = self._counts_correct and not trains
        correct = outputs[0].new_zeros((), dtype=torch.int64) if counts else None
        teaching = Teaching(self._distill, token_ids, log_probabilities)
        loss = causal_lm_loss(
            outputs,
            (target_ids, *rest),
            self._softcap,
            self._sharing,
            label_smoothing=self._label_smoothing if trains else 0.0,
            num_correct=correct,
            teaching=teaching,
        )
        self._add(teaching.total, correct, len(token_ids))
        return loss

    def _add(self, divergence: torch.Tensor, correct: torch.Tensor | None, num_targets: int) -> None:
        totals = divergence.new_zeros(2, len(self.metrics))
        totals[0, 0], totals[1, 0] = divergence, num_targets
        if correct is not None:
            totals[0, 1], totals[1, 1] = correct, num_targets
        self._totals = totals if self._totals is None else self._totals + totals

    def take_totals(self) -> torch.Tensor | None:
        """Return the sums of `metrics` over the targets since the last call, and the number of targets in each sum:
        float64 [2, K]; None without a micro-batch."""
        totals, self._totals = self._totals, None
        return totals


@dataclass(frozen=True)
class TeacherTop:
    """The teacher's distributions at some targets, on their device: numbers int64 [N], those of the targets; token_ids
    int32 [N, k]; log_probabilities fp32 [N, k + 1]."""

    numbers: torch.Tensor
    token_ids: torch.Tensor
    log_probabilities: torch.Tensor


class TeacherLoss:
    """Computes, in place of a loss, the teacher's most probable tokens at each target, and keeps them until `take`."""

    def __init__(
        self,
        config: PretrainedConfig,
        temperature: float,
        top_k: int,
        num_tokens: int,
        parallel: TensorParallel = NO_TP,
    ) -> None:
        """num_tokens: of the student's vocabulary; see `choose_top`."""
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._temperature, self._top_k, self._num_tokens = temperature, top_k, num_tokens
        self._kept: list[TeacherTop] = []

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """outputs: as in `causal_lm_loss`. targets: target tokens, which are not read; the numbers of the targets,
        int64 [N]; `loss_denominator`, not read either; and `target_indices` [N]. Returns zero."""
        hidden_states, weight = outputs
        _, numbers, _, target_indices = targets
        hidden = hidden_states.flatten(0, 1).index_select(0, target_indices)  # [N, D]
        token_ids = numbers.new_empty(len(hidden), self._top_k, dtype=torch.int32)
        log_probabilities = hidden.new_empty(len(hidden), self._top_k + 1, dtype=torch.float32)
        for chunk in list_chunks(hidden, weight, self._sharing):
            log_q = compute_log_probabilities(hidden[chunk], weight, self._softcap, self._sharing)[0]
            log_q = soften(log_q, self._temperature, self._sharing)
            token_ids[chunk], log_probabilities[chunk] = choose_top(log_q, self._top_k, self._sharing, self._num_tokens)
        self._kept.append(TeacherTop(numbers, token_ids, log_probabilities))
        return hidden.new_zeros(())

    def take(self) -> list[TeacherTop]:
        """Return what was computed since the last call, in order; empty on a rank without the loss."""
        kept, self._kept = self._kept, []
        return kept
