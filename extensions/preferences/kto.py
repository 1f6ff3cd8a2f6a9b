"""Kahneman-Tversky optimization (2402.01306): single answers, each desirable or not, against a reference point.

For an answer y to a prompt x, with the policy p trained and the reference model r fixed,

    h     log p(y|x) - log r(y|x), summed over the answer's tokens
    z0    max(0, mean of log p(y'|x) - log r(y'|x)), y' an answer to another prompt: an estimate of KL(p || r), without
          a gradient
    loss  w_D (1 - sigmoid(beta (h - z0)))  where y is desirable
          w_U (1 - sigmoid(beta (z0 - h)))  where it is not

z0 is a mean over the whole global batch (in an evaluation over all samples) that the losses need, so a forward pass
over the mismatched answers comes first. Rewards are beta h. B answers in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from batch import Column, Per, Targets
from data.encoders.kinds import find_kind
from data.loading.columns import DOCUMENT_SUMS, ReadColumn, ReadRows, read_labels
from data.options import MeanOver
from extensions.preferences.keys import KTOConfig
from extensions.preferences.mismatched import MISMATCHED, check_labels, prepare_mismatched
from extensions.preferences.pairs import SHOWN
from extensions.preferences.reference import REFERENCE, build_answer_scorer
from models.losses.cross_entropy import Loss, document_log_probabilities, get_softcap
from models.losses.logit_chunks import shard_vocabulary
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_CP, NO_TP, ContextParallel, TensorParallel
from training.config.schema import RunConfig
from training.objectives.objective import FirstPass, LastStage, Objective, PassOver, Scorer

METRICS = ("rewards_desirable", "rewards_undesirable", "rewards_accuracy", "rewards_margin", "kl")


def read_desirable(rows: ReadRows) -> np.ndarray:
    """Return whether each answer is desirable, [D]: as its label says, and of a pair the first one."""
    labels = read_labels(rows)
    return labels[:, 0] > 0 if labels.shape[1] else rows.number_samples() % 2 == 0


DESIRABLE = ReadColumn(Column("desirable", torch.float64, Per.document), read_desirable)


class KTOLoss:
    """The KTO loss (2402.01306) of the last stage, with the sums of its metrics over answers."""

    def __init__(
        self,
        config: PretrainedConfig,
        beta: float,
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        parallel: TensorParallel = NO_TP,
        sequence_part: ContextParallel = NO_CP,
    ) -> None:
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._beta, self._weights = beta, (desirable_weight, undesirable_weight)
        self._sequence_part = sequence_part
        self._kl: torch.Tensor | None = None
        self.sums = (MetricSums(*METRICS),)

    def take_first_sums(self, sums: Sequence[torch.Tensor], num_samples: int, replicas: dist.ProcessGroup) -> None:
        """Set z0 of the `num_samples` that come next. sums: what `sum_log_ratios` has returned for each micro-batch of
        this rank. All ranks of `replicas` call it; the host does not wait for the mean."""
        total = torch.stack(list(sums)).sum()
        dist.all_reduce(total, group=replicas)
        self._kl = (total / num_samples).clamp(min=0)

    def sum_log_ratios(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return the sum of h over the answers of a micro-batch, float64; each of the ranks that share sequences
        returns an equal part of it. Arguments as in a call. An answer that was cut off whole has h = 0.
        """
        return self._compute_log_ratios(outputs, targets).sum() / self._sequence_part.size

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `document_log_probabilities`, with the columns `reference`, its log-probability of
        each answer, summed over its targets, and `desirable`, 1 or 0: float64 [B].

        Returns the sum of the answers' losses over the denominator, fp32 at least; each of the ranks that share
        sequences returns an equal part of it.
        """
        assert self._kl is not None, "the forward pass over mismatched answers comes first"
        desirable = targets.columns["desirable"]
        log_ratios = self._compute_log_ratios(outputs, targets)
        desirable_weight, undesirable_weight = self._weights
        sign = 2 * desirable - 1
        weights = desirable_weight * desirable + undesirable_weight * (1 - desirable)
        losses = weights * torch.sigmoid(-self._beta * sign * (log_ratios - self._kl))  # 1 - sigmoid(x) = sigmoid(-x)
        self._add(log_ratios.detach(), desirable)
        loss = losses.sum() / targets.denominator / self._sequence_part.size
        return loss.to(torch.promote_types(outputs[1].dtype, torch.float32))

    def _compute_log_ratios(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return h, float64 [B]."""
        policy = document_log_probabilities(outputs, targets, self._softcap, self._sharing, self._sequence_part)
        return policy - targets.columns["reference"]

    def _add(self, log_ratios: torch.Tensor, desirable: torch.Tensor) -> None:
        assert self._kl is not None
        rewards, undesirable, every = self._beta * log_ratios, 1 - desirable, torch.ones_like(desirable)
        is_right = ((log_ratios > self._kl) == (desirable > 0)).double()
        margins = (rewards - self._beta * self._kl) * (desirable - undesirable)  # on the right side of z0
        sums = (rewards * desirable, rewards * undesirable, is_right, margins, self._kl * every)
        counts = (desirable, undesirable, every, every, every)
        self.sums[0].add(*(torch.stack([each.sum() for each in row]) for row in (sums, counts)))


class KTO(Objective):
    """A sample is one answer. A pair is two: the chosen answer is desirable, the rejected one is not."""

    name = "kto"
    data_kinds = ("preference",)
    mean_over = MeanOver.samples
    columns = (DESIRABLE, *DOCUMENT_SUMS)
    scored = (REFERENCE,)
    companion = MISMATCHED
    remakes_logits = True
    shown = SHOWN

    def prepare_companion(
        self, config: RunConfig, path: Path, key: str, log: Callable[[str], None] | None, compares_bytes: bool
    ) -> None:
        per_record = find_kind(config.data.name).count_samples(config.data)
        check_labels(path, key, per_record, trains=key == "train_file")
        prepare_mismatched(path, config.max_seq_length, key, per_record, log, compares_bytes)

    def build_scorer(self, config: RunConfig, stage: LastStage) -> Scorer:
        return build_answer_scorer(stage, self.group_size(config.data))

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        kto = config.read_group(KTOConfig)
        return KTOLoss(
            stage.architecture,
            kto.beta,
            desirable_weight=kto.desirable_weight,
            undesirable_weight=kto.undesirable_weight,
            parallel=stage.parallel,
            sequence_part=stage.sequence_part,
        )

    def pass_over(self, config: RunConfig) -> PassOver:
        return PassOver.companions

    def before_step(self, config: RunConfig, loss: KTOLoss) -> FirstPass:
        return FirstPass(loss.sum_log_ratios, loss.take_first_sums)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return METRICS
