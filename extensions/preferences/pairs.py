"""The shared part of losses over pairs of answers: log-probabilities of both, the exact mean over pairs, and reported
metrics.

An objective over pairs is a formula: from the log-probabilities of the answers of B pairs to a loss and two rewards per
pair. The mean over the pairs of the global batch does not depend on their split into rows, micro-batches and replicas.
Documents 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PretrainedConfig

from batch import Targets
from data.loading.columns import DOCUMENT_SUMS
from data.options import MeanOver
from models.losses.cross_entropy import Loss, document_log_probabilities, get_softcap
from models.losses.logit_chunks import shard_vocabulary
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_CP, NO_TP, ContextParallel, TensorParallel
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Objective

REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")
SHOWN = (("rewards_accuracy", "accuracy {:.1%}"), ("rewards_margin", "margin {:.4f}"))


@dataclass(frozen=True)
class Pairs:
    """B pairs, all float64 [2, B]: first the chosen answers, then the rejected ones.

    policy: log-probabilities, summed over an answer's tokens. num_tokens: those of an answer.
    reference: the same sums by the reference model; None where the formula does not need it.
    """

    policy: torch.Tensor
    num_tokens: torch.Tensor
    reference: torch.Tensor | None = None

    @property
    def policy_means(self) -> torch.Tensor:
        """Log-probabilities per token, [2, B]."""
        return self.policy / self.num_tokens


@dataclass(frozen=True)
class PairTerms:
    """The results of a formula for B pairs: losses [B], rewards [2, B], and other reported terms, name -> [B]."""

    losses: torch.Tensor
    rewards: torch.Tensor
    reported: Mapping[str, torch.Tensor] = field(default_factory=dict)


class PairFormula(Protocol):
    """A loss of pairs. needs_reference: it reads `Pairs.reference`. reported: the names in `PairTerms.reported`."""

    @property
    def needs_reference(self) -> bool: ...

    @property
    def reported(self) -> tuple[str, ...]: ...

    def __call__(self, pairs: Pairs) -> PairTerms: ...


@dataclass(frozen=True)
class WithNLL:
    """A formula plus the negative log-likelihood of the chosen answer, times a coefficient.

    per_token: take the mean over the answer's tokens, so that each pair weighs the same; else their sum. The loss is
    the mean of that over the pairs of the global batch. trl takes one mean over all tokens of a micro-batch instead:
    long answers weigh more, and the result depends on how pairs are grouped.
    """

    formula: PairFormula
    coefficient: float
    per_token: bool = True

    @property
    def needs_reference(self) -> bool:
        return self.formula.needs_reference

    @property
    def reported(self) -> tuple[str, ...]:
        return (*self.formula.reported, "nll_loss")

    def __call__(self, pairs: Pairs) -> PairTerms:
        terms = self.formula(pairs)
        nll = -(pairs.policy_means if self.per_token else pairs.policy)[0]  # [B]
        return PairTerms(terms.losses + self.coefficient * nll, terms.rewards, {**terms.reported, "nll_loss": nll})


class PairLoss:
    """The loss of the last stage, with the sums of its metrics over pairs."""

    def __init__(
        self,
        config: PretrainedConfig,
        formula: PairFormula,
        *,
        parallel: TensorParallel = NO_TP,
        sequence_part: ContextParallel = NO_CP,
    ) -> None:
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._formula, self._sequence_part = formula, sequence_part
        self.sums = (MetricSums(*REWARDS, *formula.reported),)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `document_log_probabilities`, of 2 B answers; where the formula needs it, with the
        column `reference`: its log-probability of each answer, summed over its targets, float64 [2 B].

        Returns the sum of the pairs' losses over the denominator, fp32 at least; each of the ranks that share sequences
        returns an equal part of it.
        """
        columns = targets.columns
        reference = _by_answer(columns["reference"]) if self._formula.needs_reference else None
        policy = document_log_probabilities(outputs, targets, self._softcap, self._sharing, self._sequence_part)
        terms = self._formula(Pairs(_by_answer(policy), _by_answer(columns["num_targets"]), reference))
        self._add(terms)
        loss = terms.losses.sum() / targets.denominator / self._sequence_part.size
        return loss.to(torch.promote_types(outputs[1].dtype, torch.float32))

    @torch.no_grad()
    def _add(self, terms: PairTerms) -> None:
        chosen, rejected = terms.rewards
        rewards = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
        metrics = torch.stack([*rewards, *(terms.reported[name] for name in self._formula.reported)])
        self.sums[0].add(metrics.sum(dim=1), metrics.shape[1])


def _by_answer(values: torch.Tensor) -> torch.Tensor:
    """[2 B] -> [2, B]."""
    return values.view(len(values) // 2, 2).T


class PreferenceObjective(Objective):
    """The base of objectives over pairs: each adds its formula, keys and checks.

    A sample is a pair: documents 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer.
    """

    data_kinds = ("preference",)
    unit = "pairs"
    mean_over = MeanOver.samples
    columns = DOCUMENT_SUMS
    remakes_logits = True
    shown = SHOWN

    def build_formula(self, config: RunConfig) -> PairFormula:
        """Build the loss of one pair."""
        raise NotImplementedError

    def group_size(self, data: DataConfig) -> int:
        return 2

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        formula = self.build_formula(config)
        return PairLoss(stage.architecture, formula, parallel=stage.parallel, sequence_part=stage.sequence_part)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return (*REWARDS, *self.build_formula(config).reported)
