"""Rerankers: a score for each document of a query, read together with it. With scores r of its G documents, the first
of which answers the query,

    softmax   -log softmax(r)_1
    binary    the mean of -log sigmoid(r_1) and of -log sigmoid(-r) of the others

The loss is the mean over the queries of the global batch. G documents of a query follow each other in a micro-batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from batch import Targets
from data.options import MeanOver, RowTargets
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.losses.document_scores import score_documents
from models.losses.options import RerankLossType
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.schema import DataConfig, RerankConfig
from training.objectives.objective import Metrics, Objective, ObjectiveOptions, ReportedMeans, check_pad_token


class RerankLoss:
    """The loss of the last stage of a reranker. It also adds up the metrics of all queries until `take_totals` takes
    them."""

    metrics: tuple[str, ...] = ("recall_at_1", "mrr")

    def __init__(self, loss_type: RerankLossType, group_size: int, *, sequence_part: ContextParallel = NO_CP) -> None:
        """group_size: G."""
        self._loss_type, self._group_size, self._sequence_part = loss_type, group_size, sequence_part
        self._totals: torch.Tensor | None = None

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
        totals = torch.stack([sums, torch.full_like(sums, len(ranks))])
        self._totals = totals if self._totals is None else self._totals + totals

    def take_totals(self) -> torch.Tensor | None:
        """Return the sums of `metrics` over the queries since the last call, and the number of queries in each: float64
        [2, 2]; None without queries."""
        totals, self._totals = self._totals, None
        return totals


class Rerank(Objective):
    """A sample is a query: the rows of its documents follow each other in a micro-batch, the one that answers first."""

    name = "rerank"
    unit = "queries"
    mean_over = MeanOver.samples
    head = SEQUENCE_CLASSIFICATION
    row_targets = RowTargets.last_tokens

    def count_rows(self, data: DataConfig) -> int:
        return 1 + data.num_negatives

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels(num_labels=1)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_pad_token(tokenizer, self.name)

    def describe(self, options: ObjectiveOptions) -> dict[str, str]:
        return self.describe_keys(options)

    def build_loss(
        self,
        options: ObjectiveOptions,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss:
        keys: RerankConfig = options.keys
        return RerankLoss(keys.loss_type, options.rows_per_sample, sequence_part=sequence_part)

    def list_metrics(self, options: ObjectiveOptions) -> tuple[str, ...]:
        return RerankLoss.metrics

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, RerankLoss)
        return ReportedMeans(loss, device)
