"""Rerankers: a score for each document of a query, read together with it. With scores r of its G documents, the first
of which answers the query,

    softmax   -log softmax(r)_1
    binary    the mean of -log sigmoid(r_1) and of -log sigmoid(-r) of the others

The loss is the mean over the queries of the global batch. G documents of a query follow each other in a micro-batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from batch import Targets
from data.loading.columns import LABELS
from data.options import MeanOver, RowTargets
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.losses.document_scores import score_documents
from models.losses.metric_sums import MetricSums
from models.losses.options import RerankLossType
from models.parallel.shard import NO_CP, ContextParallel
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Objective, check_pad_token

METRICS = ("recall_at_1", "mrr")


class RerankLoss:
    """The loss of the last stage of a reranker, with the sums of its metrics over queries."""

    def __init__(self, loss_type: RerankLossType, group_size: int, *, sequence_part: ContextParallel = NO_CP) -> None:
        """group_size: G."""
        self._loss_type, self._group_size, self._sequence_part = loss_type, group_size, sequence_part
        self.sums = (MetricSums(*METRICS),)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `score_documents`, of the documents of whole queries, which have no labels.

        Returns the sum of the queries' losses over the denominator, fp32 at least; each of the ranks that share
        sequences returns an equal part of it.
        """
        scores = score_documents(outputs, targets, self._sequence_part)
        grouped = scores.view(len(scores) // self._group_size, self._group_size)
        self._add(grouped.detach())
        losses = self._compute_losses(grouped)
        return (losses.sum() / targets.denominator / self._sequence_part.size).to(scores.dtype)

    def _compute_losses(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the losses of the queries, [Q]. scores: [Q, G]."""
        if self._loss_type is RerankLossType.softmax:
            return -scores.log_softmax(dim=1)[:, 0]
        answers = torch.zeros_like(scores)
        answers[:, 0] = 1
        return F.binary_cross_entropy_with_logits(scores, answers, reduction="none").mean(dim=1)

    def _add(self, scores: torch.Tensor) -> None:
        ranks = (scores >= scores[:, :1]).sum(dim=1).double()  # as high a score counts against the answer
        sums = torch.stack([(ranks == 1).double().sum(), (1 / ranks).sum()])
        self.sums[0].add(sums, len(ranks))


class Rerank(Objective):
    """A sample is a query: the rows of its documents follow each other in a micro-batch, the one that answers first."""

    name = "rerank"
    unit = "queries"
    mean_over = MeanOver.samples
    head = SEQUENCE_CLASSIFICATION
    row_targets = RowTargets.last_tokens
    columns = (LABELS,)

    def group_size(self, data: DataConfig) -> int:
        return 1 + data.num_negatives

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels(num_labels=1)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_pad_token(tokenizer, self.name)

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        return RerankLoss(config.rerank.loss_type, self.group_size(config.data), sequence_part=stage.sequence_part)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return METRICS
