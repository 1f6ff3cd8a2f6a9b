"""Reward models: the Bradley-Terry loss (2009.01325) of a pair with scores r_w of the chosen answer and r_l of the
rejected one,

    -log sigmoid(r_w - r_l) + c (r_w + r_l)^2

c: centering_coef (2312.09244). The first term depends on the difference alone; the second keeps the scores around zero.

B pairs in a micro-batch; documents 2 i and 2 i + 1 are chosen and rejected.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from batch import Targets
from data.loading.columns import LABELS
from data.options import MeanOver, RowTargets
from extensions.preferences.keys import RewardConfig
from extensions.preferences.pairs import SHOWN
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.losses.document_scores import score_documents
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_CP, ContextParallel
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Objective, check_pad_token

METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")


class RewardLoss:
    """The loss of the last stage of a reward model, with the sums of its metrics over pairs."""

    def __init__(self, centering_coef: float = 0.0, *, sequence_part: ContextParallel = NO_CP) -> None:
        self._centering_coef, self._sequence_part = centering_coef, sequence_part
        self.sums = (MetricSums(*METRICS),)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `score_documents`, of 2 B answers, which have no labels.

        Returns the sum of the pairs' losses over the denominator, fp32 at least; each of the ranks that share sequences
        returns an equal part of it.
        """
        scores = score_documents(outputs, targets, self._sequence_part)
        chosen, rejected = scores.double().view(len(scores) // 2, 2).T
        losses = -F.logsigmoid(chosen - rejected)
        if self._centering_coef:
            losses = losses + self._centering_coef * (chosen + rejected).square()
        self._add(chosen.detach(), rejected.detach())
        return (losses.sum() / targets.denominator / self._sequence_part.size).to(scores.dtype)

    def _add(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        metrics = torch.stack([chosen, rejected, chosen - rejected, (chosen > rejected).double()])
        self.sums[0].add(metrics.sum(dim=1), metrics.shape[1])


class Reward(Objective):
    """A sample is a pair: documents 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer."""

    name = "reward"
    pipeline_tag = "text-classification"
    data_kinds = ("preference",)
    unit = "pairs"
    mean_over = MeanOver.samples
    head = SEQUENCE_CLASSIFICATION
    row_targets = RowTargets.last_tokens
    columns = (LABELS,)
    shown = SHOWN

    def group_size(self, data: DataConfig) -> int:
        return 2

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels(num_labels=1)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_pad_token(tokenizer, self.name)

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        return RewardLoss(config.read_group(RewardConfig).centering_coef, sequence_part=stage.sequence_part)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return METRICS
