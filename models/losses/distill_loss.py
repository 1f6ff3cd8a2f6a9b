"""The losses of a distillation: of the student, next-token cross entropy and the divergence from its teacher; and of
the teacher, in place of a loss, the distributions that the student is compared with, or the hidden states that they
follow from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from batch import Targets
from models.losses.cross_entropy import causal_lm_loss, get_softcap
from models.losses.divergence import DistillOptions, Known, Teaching, choose_top, soften
from models.losses.logit_chunks import VocabularyShard, compute_log_probabilities, list_chunks, shard_vocabulary
from models.parallel.shard import NO_TP, TensorParallel


class DistillLoss(ABC):
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

    @abstractmethod
    def open_teacher(self, targets: Targets) -> Callable[[slice], Known]:
        """Return the function by which `Teaching` finds the teacher's distributions at a slice of the targets."""

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `causal_lm_loss`, with the columns that `open_teacher` reads."""
        trains = torch.is_grad_enabled()
        counts = self._counts_correct and not trains
        correct = outputs[0].new_zeros((), dtype=torch.int64) if counts else None
        teaching = Teaching(self._distill, self.open_teacher(targets), outputs[0].device)
        loss = causal_lm_loss(
            outputs,
            targets,
            self._softcap,
            self._sharing,
            label_smoothing=self._label_smoothing if trains else 0.0,
            num_correct=correct,
            teaching=teaching,
        )
        self._add(teaching.total, correct, len(targets.indices))
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


class KeptDistillLoss(DistillLoss):
    """The loss of a student whose teacher has left its most probable tokens next to the data."""

    def open_teacher(self, targets: Targets) -> Callable[[slice], Known]:
        """targets: with the columns `teacher_token_ids` [N, k] and `teacher_log_probabilities` [N, k + 1]."""
        token_ids, logs = targets.columns["teacher_token_ids"], targets.columns["teacher_log_probabilities"]
        return lambda chunk: (token_ids[chunk], logs[chunk])


class TeacherHead:
    """The head of a teacher that is in memory next to its student. Of its forward pass the hidden states at the targets
    are kept, and turned into distributions next to the student's logits, a chunk of targets at a time: N x V of them
    are never there."""

    def __init__(
        self,
        config: PretrainedConfig,
        temperature: float,
        top_k: int | None,
        num_tokens: int,
        parallel: TensorParallel = NO_TP,
    ) -> None:
        """config: the teacher's. top_k: None for the distribution over all tokens, which must be the student's then.
        num_tokens: of the student's vocabulary; see `choose_top`. parallel: the ranks that share the teacher's head."""
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._temperature, self._top_k, self._num_tokens = temperature, top_k, num_tokens
        self._weight: torch.Tensor | None = None

    def take(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return the hidden states at the targets, [N, D]: in place of a loss. outputs, targets: as in
        `causal_lm_loss`."""
        hidden_states, self._weight = outputs
        return hidden_states.flatten(0, 1).index_select(0, targets.indices)

    def find(self, hidden: torch.Tensor) -> Known:
        """Return the distributions at n targets. hidden: what `take` has returned of them, [n, D]."""
        assert self._weight is not None, "the teacher's pass comes first"
        with torch.no_grad():
            log_q = compute_softened(hidden, self._weight, self._softcap, self._sharing, self._temperature)
            if self._top_k is None:
                return None, log_q
            return choose_top(log_q, self._top_k, self._sharing, self._num_tokens)


class OnlineDistillLoss(DistillLoss):
    """The loss of a student whose teacher is in memory, and has run before it over the micro-batches that come."""

    _head: TeacherHead | None = None

    def take_states(self, head: TeacherHead, states: Sequence[torch.Tensor]) -> None:
        """Take the teacher's hidden states at the targets of the micro-batches that come next, [N, D] of each, in their
        order."""
        self._head, self._waiting = head, deque(states)

    def open_teacher(self, targets: Targets) -> Callable[[slice], Known]:
        head = self._head
        assert head is not None, "the teacher's pass comes first, and micro-batches in the same order"
        states = self._waiting.popleft()
        return lambda chunk: head.find(states[chunk])


def compute_softened(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    softcap: float | None,
    sharing: VocabularyShard | None,
    temperature: float,
) -> torch.Tensor:
    """Return a teacher's log-probabilities at a temperature, [n, V], fp32 at least."""
    return soften(compute_log_probabilities(hidden, weight, softcap, sharing)[0], temperature, sharing)


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

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs: as in `causal_lm_loss`. targets: with the column `target_numbers`, int64 [N]. Returns zero."""
        hidden_states, weight = outputs
        numbers = targets.columns["target_numbers"]
        hidden = hidden_states.flatten(0, 1).index_select(0, targets.indices)  # [N, D]
        token_ids = numbers.new_empty(len(hidden), self._top_k, dtype=torch.int32)
        log_probabilities = hidden.new_empty(len(hidden), self._top_k + 1, dtype=torch.float32)
        for chunk in list_chunks(hidden, weight, self._sharing):
            log_q = compute_softened(hidden[chunk], weight, self._softcap, self._sharing, self._temperature)
            token_ids[chunk], log_probabilities[chunk] = choose_top(log_q, self._top_k, self._sharing, self._num_tokens)
        self._kept.append(TeacherTop(numbers, token_ids, log_probabilities))
        return hidden.new_zeros(())

    def take(self) -> list[TeacherTop]:
        """Return what was computed since the last call, in order; empty on a rank without the loss."""
        kept, self._kept = self._kept, []
        return kept
