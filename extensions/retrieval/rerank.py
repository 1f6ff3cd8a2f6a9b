"""Rerankers: models that read a query together with a document and return one score, which is high if the document
answers the query.

A query has G documents, and only the first one answers it. With their scores r_1, ..., r_G, the loss of the query is

    softmax   -log softmax(r)_1                                                         (2101.08751)
    binary    the mean over the G documents of -log sigmoid(r_1) for the first one,
              and of -log sigmoid(-r_g) for each other document g                       (1901.04085)

The loss of a step is the mean over the queries of the global batch. The G documents of a query are consecutive rows of
one micro-batch, or consecutive documents of a packed row.

N documents of a micro-batch, Q = N / G queries.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from batch import Targets
from data.loading.columns import LABELS
from data.options import MeanOver, RowTargets
from extensions.retrieval.contrast import SHOWN
from extensions.retrieval.keys import DataKeys, RerankConfig, RerankLossType
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.losses.document_scores import score_documents
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_CP, ContextParallel
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Objective, check_pad_token

# Both are means over queries. recall_at_1: the share of queries whose answer has a higher score than each of the other
# documents. mrr: the mean of 1 / rank of the answer among the G documents, which are sorted by score, highest first.
METRICS = ("recall_at_1", "mrr")


class RerankLoss:
    """The loss of a reranker, computed on the last stage. Each call also adds its queries to the metrics in `sums`."""

    def __init__(self, loss_type: RerankLossType, group_size: int, *, sequence_part: ContextParallel = NO_CP) -> None:
        """loss_type: the formula, as in the module's docstring. group_size: G, the consecutive documents that belong to
        one query. sequence_part: the part of each row that this rank holds (context parallelism)."""
        self._loss_type, self._group_size, self._sequence_part = loss_type, group_size, sequence_part
        self.sums = (MetricSums(*METRICS),)  # the sums of `METRICS` over all queries since they were last taken

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return the loss of a micro-batch: the sum of its queries' losses divided by `targets.denominator`, a scalar
        in fp32 or wider. If several ranks share each sequence, each returns an equal share of it, so that the sum over
        these ranks is the loss.

        outputs: the hidden states [B, T, D] of B rows and T tokens, and the head's matrix [1, D]. targets: the number
        of each document at its last token, as `score_documents` reads them. All G documents of a query are in the
        micro-batch. The column `labels` is empty, [N, 0]: the order of the documents says which one is the answer.
        """
        scores = score_documents(outputs, targets, self._sequence_part)
        grouped = scores.view(len(scores) // self._group_size, self._group_size)
        self._add(grouped.detach())
        losses = self._compute_losses(grouped)
        return (losses.sum() / targets.denominator / self._sequence_part.size).to(scores.dtype)

    def _compute_losses(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of each query, [Q]. scores: [Q, G], the answer's score first."""
        if self._loss_type is RerankLossType.softmax:
            return -scores.log_softmax(dim=1)[:, 0]
        answers = torch.zeros_like(scores)
        answers[:, 0] = 1
        return F.binary_cross_entropy_with_logits(scores, answers, reduction="none").mean(dim=1)

    def _add(self, scores: torch.Tensor) -> None:
        """Add queries to the sums of the metrics. scores: [Q, G], the answer's score first."""
        # The rank of each answer, from 1. A document with the same score as the answer ranks before it.
        is_known = scores.isfinite().all(dim=1)  # NaN would have the best rank
        ranks = (scores >= scores[:, :1]).sum(dim=1).double().where(is_known, torch.nan)
        sums = torch.stack([(ranks == 1).double().where(is_known, torch.nan).sum(), (1 / ranks).sum()])
        self.sums[0].add(sums, len(ranks))


class Rerank(Objective):
    """The objective of a reranker (`task=rerank`). A sample is a query with its G documents, which follow each other in
    a micro-batch; the first one answers the query. `Objective` explains the fields."""

    name = "rerank"
    pipeline_tag = "text-ranking"
    unit = "queries"
    mean_over = MeanOver.samples  # queries
    head = SEQUENCE_CLASSIFICATION  # with one output, the score
    row_targets = RowTargets.last_tokens  # a document is scored at its last token
    columns = (LABELS,)  # [N, 0], without values: under context parallelism its length is the number of documents
    shown = SHOWN

    def group_size(self, data: DataConfig) -> int:
        """Return G, the number of documents of a query: its answer and `data.num_negatives` others."""
        assert isinstance(data, DataKeys)
        return 1 + data.num_negatives

    def name_labels(self, data: DataConfig) -> Labels:
        """Return the single output of the head, the score."""
        return Labels(num_labels=1)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError for a tokenizer without a pad token, or whose pad token is also its end token: transformers
        finds the last token of a document by the padding after it."""
        check_pad_token(tokenizer, self.name)

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        """Build the loss that `rerank.loss_type` names. stage: the last stage, with the ranks that share sequences."""
        loss_type = config.read_group(RerankConfig).loss_type
        return RerankLoss(loss_type, self.group_size(config.data), sequence_part=stage.sequence_part)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        """Return `METRICS`, which an evaluation reports in addition to the loss."""
        return METRICS
