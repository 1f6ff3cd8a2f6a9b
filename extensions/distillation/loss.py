"""The parts of a distillation: a term of the student's loss, its divergence from the teacher; and of the teacher, in
place of a loss, the distributions that the student is compared with, or the hidden states that they follow from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from batch import Targets
from extensions.distillation.divergence import DistillOptions, Known, TeacherComparison, choose_top, soften
from models.losses.cross_entropy import get_softcap
from models.losses.logit_chunks import VocabularyShard, compute_log_probabilities, list_chunks, shard_vocabulary
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_TP, TensorParallel


class TeacherTerm(ABC):
    """The divergence of a student from its teacher: a term of its loss (`LossTerm`)."""

    def __init__(self, options: DistillOptions) -> None:
        self._options = options
        self.sums = MetricSums("distill_loss")

    @abstractmethod
    def find(self, targets: Targets) -> Callable[[slice], Known]:
        """Return the function that returns the teacher's distributions at a slice of the targets."""

    def open(self, targets: Targets) -> TeacherComparison:
        return TeacherComparison(self._options, self.find(targets), self.sums)


class KeptTeacherTerm(TeacherTerm):
    """A teacher that has left its most probable tokens next to the data."""

    def find(self, targets: Targets) -> Callable[[slice], Known]:
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


class OnlineTeacherTerm(TeacherTerm):
    """A teacher that is in memory, and has run over the micro-batches that come next."""

    def __init__(self, options: DistillOptions, head: TeacherHead | None) -> None:
        """head: None for a loss that nothing is computed with."""
        super().__init__(options)
        self._head = head
        self._waiting: deque[torch.Tensor] = deque()

    @property
    def head(self) -> TeacherHead:
        assert self._head is not None
        return self._head

    def take_states(self, states: Sequence[torch.Tensor], *_: Any) -> None:
        """Take the teacher's hidden states at the targets of the micro-batches that come next, [N, D] of each, in their
        order: what `TeacherHead.take` has returned."""
        self._waiting = deque(states)

    def find(self, targets: Targets) -> Callable[[slice], Known]:
        assert self._waiting, "the teacher's pass comes first, and micro-batches in the same order"
        states = self._waiting.popleft()
        return lambda chunk: self.head.find(states[chunk])


def compute_softened(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    softcap: float | None,
    sharing: VocabularyShard | None,
    temperature: float,
) -> torch.Tensor:
    """Return a teacher's log-probabilities at a temperature, [n, V], fp32 at least."""
    return soften(compute_log_probabilities(hidden, weight, softcap, sharing)[0], temperature, sharing)


class TeacherTop:
    """Computes, in place of a loss, the teacher's most probable tokens at each target."""

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

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> tuple[torch.Tensor, ...]:
        """Return the tokens, int32 [N, k], and the log-probabilities of these and of all others together, fp32
        [N, k + 1]. outputs, targets: as in `causal_lm_loss`."""
        hidden_states, weight = outputs
        hidden = hidden_states.flatten(0, 1).index_select(0, targets.indices)  # [N, D]
        token_ids = hidden.new_empty(len(hidden), self._top_k, dtype=torch.int32)
        log_probabilities = hidden.new_empty(len(hidden), self._top_k + 1, dtype=torch.float32)
        for chunk in list_chunks(hidden, weight, self._sharing):
            log_q = compute_softened(hidden[chunk], weight, self._softcap, self._sharing, self._temperature)
            token_ids[chunk], log_probabilities[chunk] = choose_top(log_q, self._top_k, self._sharing, self._num_tokens)
        return token_ids, log_probabilities
