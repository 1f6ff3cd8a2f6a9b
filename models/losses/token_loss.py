"""Next-token cross entropy as a run uses it: with smoothed labels in training, and terms that are opened for each
micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from transformers import PretrainedConfig

from batch import Targets
from models.losses.cross_entropy import ChunkTerm, TargetChunk, causal_lm_loss, get_softcap
from models.losses.logit_chunks import VocabularyShard, predict, shard_vocabulary
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_TP, TensorParallel


class LossTerm(Protocol):
    """A term that a run adds to the cross entropy, or a count next to it.

    sums: the metrics that it reports.
    """

    sums: MetricSums

    def open(self, targets: Targets) -> ChunkTerm | None:
        """Return the term of a micro-batch with these targets; None if it has none."""
        ...


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The loss of the last stage."""

    config: PretrainedConfig  # of the model
    parallel: TensorParallel = NO_TP  # the ranks that share the head
    label_smoothing: float = 0.0  # see `causal_lm_loss`; in training only, so that evaluation losses stay comparable
    terms: tuple[LossTerm, ...] = ()

    @cached_property
    def _sharing(self) -> VocabularyShard | None:
        return shard_vocabulary(self.config, self.parallel)

    @property
    def sums(self) -> Sequence[MetricSums]:
        """The metrics of all terms."""
        return [term.sums for term in self.terms]

    def without_terms(self) -> Self:
        """Return the cross entropy alone."""
        return replace(self, terms=())

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Compute `causal_lm_loss` of one micro-batch."""
        opened = [term.open(targets) for term in self.terms]
        return causal_lm_loss(
            outputs,
            targets,
            get_softcap(self.config),
            self._sharing,
            label_smoothing=self.label_smoothing if torch.is_grad_enabled() else 0.0,
            terms=[term for term in opened if term is not None],
        )


class TokenAccuracy:
    """Counts the targets of evaluations that have the largest logit; of equal logits the first counts. Ranks that share
    the vocabulary count the same targets, which changes no mean."""

    coef = 0.0

    def __init__(self) -> None:
        self.sums = MetricSums("token_accuracy")

    def open(self, targets: Targets) -> ChunkTerm | None:
        return None if torch.is_grad_enabled() else self

    def __call__(self, chunk: TargetChunk) -> None:
        is_right = predict(chunk.log_probabilities, chunk.sharing) == chunk.target_ids
        self.sums.add(is_right.sum()[None], len(is_right))
