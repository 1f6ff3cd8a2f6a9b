"""Classes of documents, or numbers: the losses of `transformers` for its sequence classifiers, each a mean over the
documents of the global batch.

    single_label_classification   w_y * -log softmax(scores)_y
    multi_label_classification    the mean over the labels of w_c * binary cross entropy
    regression                    the mean over the numbers of (score - number)^2

w: class_weights, 1 by default. Evaluations report what scikit-learn would over the whole file: accuracy (all labels of
a document are right), f1 (macro), auc (macro, one class against the others); of numbers the mean absolute error, mae.
N documents, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from batch import Targets
from console import pluralize
from data.loading.columns import LABELS
from data.options import ProblemType, RowTargets
from errors import UserError
from extensions.classification.keys import ClassificationConfig
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.losses.document_scores import score_documents
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_CP, ContextParallel
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Metrics, Objective, check_pad_token

SHOWN = (("accuracy", "accuracy {:.1%}"), ("f1", "f1 {:.4f}"), ("auc", "auc {:.4f}"))


@dataclass(frozen=True)
class _Decided:
    """The labels and the scores of N documents, as metrics take them: whether a document has each label, and whether
    the scores say so, bool [N, C]; and a number that is the larger the surer they are of it, float64 [N, C]."""

    actual: torch.Tensor
    predicted: torch.Tensor
    confidence: torch.Tensor


def _decide(problem_type: ProblemType, scores: torch.Tensor, labels: torch.Tensor) -> _Decided:
    if problem_type is ProblemType.multi_label_classification:
        return _Decided(labels > 0, scores > 0, scores.double())
    num_labels = scores.shape[1]
    actual = F.one_hot(labels[:, 0].long(), num_labels) > 0
    return _Decided(actual, F.one_hot(scores.argmax(dim=1), num_labels) > 0, scores.double().softmax(dim=1))


def compute_auc(scores: torch.Tensor, actual: torch.Tensor) -> float | None:
    """Return the area under the ROC curve: the probability that a document with the label has a higher score than one
    without, equal scores counting half. None where all documents have it, or none has.

    scores: float [N]. actual: bool [N].
    """
    num_with = int(actual.sum())
    num_without = len(actual) - num_with
    if not num_with or not num_without:
        return None
    _, places, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # the mean rank of equal scores, from 1
    above = ranks[places][actual].sum().item() - num_with * (num_with + 1) / 2
    return above / (num_with * num_without)


class ClassScores:
    """The scores of documents, or steps, with their labels: counted in training, and kept in an evaluation, since F1
    and AUC depend on all of them."""

    def __init__(self, problem_type: ProblemType, num_labels: int) -> None:
        self.sums = MetricSums("accuracy")
        self._problem_type, self._num_labels = problem_type, num_labels
        self._kept: list[_Decided] = []

    def add(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """scores: [N, C]. labels: [N, K]."""
        decided = _decide(self._problem_type, scores.detach(), labels)
        is_right = (decided.actual == decided.predicted).all(dim=1).double()
        is_right = is_right.where(scores.detach().isfinite().all(dim=1), torch.nan)  # NaN decides for no label
        self.sums.add(is_right.sum()[None], len(is_right))
        if not torch.is_grad_enabled():
            self._kept.append(decided)

    def finish_evaluation(self, device: torch.device) -> dict[str, float]:
        """Return `f1` and, unless each label is everywhere or nowhere, `auc`, of the documents of all ranks, which all
        call it."""
        kept, self._kept = self._kept, []
        counts = torch.zeros(1 + 3 * self._num_labels, dtype=torch.float64, device=device)
        for each in kept:
            per_label = torch.stack([each.actual & each.predicted, each.predicted, each.actual]).sum(dim=1)
            counts += torch.cat([per_label.new_full((1,), len(each.actual)), per_label.flatten()])
        dist.all_reduce(counts)
        if not counts[0]:
            return {}
        areas = self._compute_areas(kept, device)
        f1 = compute_f1(counts[1:].view(3, -1), self._problem_type is ProblemType.multi_label_classification)
        return {"f1": f1} | ({"auc": sum(areas) / len(areas)} if areas else {})

    def _compute_areas(self, kept: Sequence[_Decided], device: torch.device) -> list[float]:
        """Return the AUC, over the documents of all ranks, of each label that has one. All ranks call it."""
        none = torch.zeros(self._num_labels, 0, dtype=torch.float64, device=device)
        # [C, N], joined once: there may be thousands of micro-batches, and thousands of labels
        confidence = torch.cat([none, *(each.confidence.T for each in kept)], dim=1)
        actual = torch.cat([none.bool(), *(each.actual.T for each in kept)], dim=1)
        areas = []
        for own_scores, own_actual in zip(confidence, actual):
            scores, there = gather_columns(torch.stack([own_scores, own_actual.double()]))
            areas.append(compute_auc(scores, there > 0))
        return [area for area in areas if area is not None]


def compute_f1(counts: torch.Tensor, counts_absent: bool) -> float:
    """Return the mean F1 of labels, 2 found / (said + there), as scikit-learn has it; 0 without labels.

    counts: [3, C], documents whose label is found, said, and there. counts_absent: whether a label that neither occurs
    nor is predicted counts as 0, as where documents have several labels; else it does not count.
    """
    found, said, there = counts
    occurs = said + there > 0
    num_labels = len(occurs) if counts_absent else max(1, int(occurs.sum()))
    return (2 * found[occurs] / (said + there)[occurs]).sum().item() / num_labels


def gather_columns(mine: torch.Tensor) -> torch.Tensor:
    """Return the columns of all ranks, [K, sum of N]. mine: [K, N], N of this rank's own. All ranks call it."""
    widths = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(dist.get_world_size())]
    dist.all_gather(widths, torch.tensor([mine.shape[1]], device=mine.device))
    sizes = [int(width) for width in widths]
    padded = F.pad(mine, (0, max(sizes) - mine.shape[1])).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


class ClassificationLoss:
    """The loss of the last stage of a classifier.

    scores: the scores of documents since they were last taken; None for a regression, which sums absolute errors.
    """

    def __init__(
        self,
        problem_type: ProblemType,
        num_labels: int,
        class_weights: Sequence[float] | None = None,
        *,
        sequence_part: ContextParallel = NO_CP,
    ) -> None:
        self._problem_type = problem_type
        self._weights = None if class_weights is None else torch.tensor(class_weights)
        self._sequence_part = sequence_part
        self.scores = None if problem_type is ProblemType.regression else ClassScores(problem_type, num_labels)
        self.sums = (MetricSums("mae") if self.scores is None else self.scores.sums,)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `score_documents`; labels: [N, 1], the number of the class; or [N, C], whether a
        document has each label, 1 or 0, or the numbers.

        Returns the sum of the documents' losses over the denominator, fp32 at least; each of the ranks that share
        sequences returns an equal part of it.
        """
        labels = targets.columns["labels"]
        scores = score_documents(outputs, targets, self._sequence_part)
        expected = 1 if self._problem_type is ProblemType.single_label_classification else scores.shape[1]
        if labels.shape[1] != expected:  # of an encoder of the user's
            raise UserError(
                f"data: a record has {pluralize(labels.shape[1], 'label')}, where data.problem_type="
                f"{self._problem_type.value} takes {expected} for {pluralize(scores.shape[1], 'output')} of the model; "
                "give data.labels, or correct the encoder"
            )
        if self.scores is None:
            errors = (scores.detach() - labels).abs()
            self.sums[0].add(errors.double().sum()[None], errors.numel())
        else:
            self.scores.add(scores, labels)
        total = self._compute_losses(scores, labels).sum()
        return (total / targets.denominator / self._sequence_part.size).to(scores.dtype)

    def _compute_losses(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses of the documents, [N]."""
        weights = None if self._weights is None else self._weights.to(scores)
        if self._problem_type is ProblemType.single_label_classification:
            return F.cross_entropy(scores, labels[:, 0].long(), weights, reduction="none")
        if self._problem_type is ProblemType.multi_label_classification:
            losses = F.binary_cross_entropy_with_logits(scores, labels.to(scores), weights, reduction="none")
            return losses.mean(dim=1)
        return (scores - labels.to(scores)).square().mean(dim=1)


class Classification(Objective):
    """A sample is a document; packed rows hold several, each with its own label."""

    name = "classification"
    pipeline_tag = "text-classification"
    unit = "documents"
    head = SEQUENCE_CLASSIFICATION
    row_targets = RowTargets.last_tokens
    columns = (LABELS,)
    needs_labels = True
    errors = ("mae",)
    shown = (*SHOWN, ("mae", "mae {:.4f}"))

    def name_labels(self, data: DataConfig) -> Labels:
        is_single = data.problem_type is ProblemType.regression and not data.labels
        return Labels(tuple(data.labels or ()), 1 if is_single else None, data.problem_type.value)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_pad_token(tokenizer, self.name)

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        """Raises UserError for class weights that do not fit the labels."""
        weights, architecture = config.read_group(ClassificationConfig).class_weights, stage.architecture
        problem_type = ProblemType(architecture.problem_type)
        _check_weights(weights, architecture.num_labels, problem_type)
        return ClassificationLoss(problem_type, architecture.num_labels, weights, sequence_part=stage.sequence_part)

    def metrics(self, loss: ClassificationLoss, device: torch.device) -> Metrics:
        return super().metrics(loss, device) if loss.scores is None else build_class_metrics(loss.scores, device)


def build_class_metrics(scores: ClassScores, device: torch.device) -> Metrics:
    """Build accuracy, F1 and AUC over whole global batches and evaluations."""
    return Metrics((scores.sums,), device, scores.finish_evaluation)


def _check_weights(weights: Sequence[float] | None, num_labels: int, problem_type: ProblemType) -> None:
    if weights is None:
        return
    if problem_type is ProblemType.regression:
        raise UserError("classification.class_weights: numbers have no classes (data.problem_type=regression); omit it")
    if len(weights) != num_labels or not all(0 <= weight < float("inf") for weight in weights):
        raise UserError(
            f"classification.class_weights={list(weights)}: give one weight of 0 or more for each of the {num_labels} "
            "labels"
        )
