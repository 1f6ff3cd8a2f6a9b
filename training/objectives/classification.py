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
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from batch import Targets
from data.options import ProblemType, RowTargets
from errors import UserError
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.losses.document_scores import score_documents
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.schema import ClassificationConfig, DataConfig
from training.objectives.objective import Metrics, Objective, ObjectiveOptions, check_pad_token


class ClassificationLoss:
    """The loss of the last stage of a classifier. It also keeps the scores and labels of all documents until
    `take_scored` takes them."""

    def __init__(
        self,
        problem_type: ProblemType,
        num_labels: int,
        class_weights: Sequence[float] | None = None,
        *,
        sequence_part: ContextParallel = NO_CP,
    ) -> None:
        self.problem_type, self.num_labels = problem_type, num_labels
        self._weights = None if class_weights is None else torch.tensor(class_weights)
        self._sequence_part = sequence_part
        self._scored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `score_documents`; labels: [N, 1], the number of the class; or [N, C], whether a
        document has each label, 1 or 0, or the numbers.

        Returns the sum of the documents' losses over the denominator, fp32 at least; each of the ranks that share
        sequences returns an equal part of it.
        """
        labels = targets.columns["labels"]
        scores = score_documents(outputs, targets, self._sequence_part)
        self._scored.append((scores.detach(), labels))
        total = self._compute_losses(scores, labels).sum()
        return (total / targets.denominator / self._sequence_part.size).to(scores.dtype)

    def _compute_losses(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses of the documents, [N]."""
        weights = None if self._weights is None else self._weights.to(scores)
        if self.problem_type is ProblemType.single_label_classification:
            return F.cross_entropy(scores, labels[:, 0].long(), weights, reduction="none")
        if self.problem_type is ProblemType.multi_label_classification:
            losses = F.binary_cross_entropy_with_logits(scores, labels.to(scores), weights, reduction="none")
            return losses.mean(dim=1)
        return (scores - labels.to(scores)).square().mean(dim=1)

    def take_scored(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the scores [N, C] and labels [N, K] of the micro-batches since the last call."""
        scored, self._scored = self._scored, []
        return scored


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


class ScoringLoss(Protocol):
    """A loss that keeps what it scores, each with one label of `num_labels`, or several."""

    problem_type: ProblemType
    num_labels: int

    def take_scored(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the scores [N, C] and labels [N, K] of the micro-batches since the last call."""
        ...


class ClassMetrics:
    """Accuracy, F1 and AUC over whole global batches and evaluations: ranks add up their counts, and each sees the
    scores of all for the order that AUC depends on."""

    def __init__(self, loss: ScoringLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def _zeros(self) -> torch.Tensor:
        """[right documents, documents, and of each label: found, said, there]."""
        return torch.zeros(2 + 3 * self._loss.num_labels, dtype=torch.float64, device=self._device)

    def _count(self, decided: Sequence[_Decided]) -> torch.Tensor:
        counts = self._zeros()
        for each in decided:
            right = (each.actual == each.predicted).all(dim=1).sum()
            per_label = torch.stack([each.actual & each.predicted, each.predicted, each.actual]).sum(dim=1)
            counts += torch.cat([torch.stack([right, right.new_tensor(len(each.actual))]), per_label.flatten()])
        return counts

    def _take(self) -> list[_Decided]:
        return [_decide(self._loss.problem_type, *scored) for scored in self._loss.take_scored()]

    def add_step(self, counts: bool) -> None:
        decided = self._take()
        if counts:
            self._interval += self._count(decided)

    def finish_interval(self) -> dict[str, float]:
        counts, self._interval = self._interval, self._zeros()
        dist.all_reduce(counts)
        right, total = counts[:2].tolist()
        return {"accuracy": right / total} if total else {}

    def finish_evaluation(self) -> dict[str, float]:
        """Return `eval_accuracy`, `eval_f1` and, unless each label is everywhere or nowhere, `eval_auc`. All ranks call
        it."""
        decided = self._take()
        counts = self._count(decided)
        dist.all_reduce(counts)
        right, total = counts[:2].tolist()
        if not total:
            return {}
        areas = self._compute_areas(decided)
        metrics = {"eval_accuracy": right / total, "eval_f1": compute_f1(counts[2:].view(3, -1))}
        return metrics | ({"eval_auc": sum(areas) / len(areas)} if areas else {})

    def _compute_areas(self, decided: Sequence[_Decided]) -> list[float]:
        """Return the AUC, over the documents of all ranks, of each label that has one. All ranks call it."""
        none = torch.zeros(self._loss.num_labels, 0, dtype=torch.float64, device=self._device)
        # [C, N], joined once: there may be thousands of micro-batches, and thousands of labels
        confidence = torch.cat([none, *(each.confidence.T for each in decided)], dim=1)
        actual = torch.cat([none.bool(), *(each.actual.T for each in decided)], dim=1)
        areas = []
        for own_scores, own_actual in zip(confidence, actual):
            scores, there = gather_columns(torch.stack([own_scores, own_actual.double()]))
            areas.append(compute_auc(scores, there > 0))
        return [area for area in areas if area is not None]


def compute_f1(counts: torch.Tensor) -> float:
    """Return the mean F1 of the labels that occur or are predicted, 2 found / (said + there). counts: [3, C], documents
    whose label is found, said, and there."""
    found, said, there = counts
    occurs = said + there > 0
    return (2 * found[occurs] / (said + there)[occurs]).mean().item()


def gather_columns(mine: torch.Tensor) -> torch.Tensor:
    """Return the columns of all ranks, [K, sum of N]. mine: [K, N], N of this rank's own. All ranks call it."""
    widths = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(dist.get_world_size())]
    dist.all_gather(widths, torch.tensor([mine.shape[1]], device=mine.device))
    sizes = [int(width) for width in widths]
    padded = F.pad(mine, (0, max(sizes) - mine.shape[1])).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


class ErrorMetrics:
    """The mean absolute error of numbers, over whole global batches and evaluations."""

    def __init__(self, loss: ClassificationLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def _zeros(self) -> torch.Tensor:
        """[sum of errors, numbers]."""
        return torch.zeros(2, dtype=torch.float64, device=self._device)

    def _take(self) -> torch.Tensor:
        sums = self._zeros()
        for scores, labels in self._loss.take_scored():
            errors = (scores - labels).abs().double()
            sums += torch.stack([errors.sum(), errors.new_tensor(errors.numel())])
        return sums

    def add_step(self, counts: bool) -> None:
        sums = self._take()
        if counts:
            self._interval += sums

    def finish_interval(self) -> dict[str, float]:
        sums, self._interval = self._interval, self._zeros()
        return self._compute_mean(sums, "mae")

    def finish_evaluation(self) -> dict[str, float]:
        return self._compute_mean(self._take(), "eval_mae")

    def _compute_mean(self, sums: torch.Tensor, name: str) -> dict[str, float]:
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return {name: total / count} if count else {}


class Classification(Objective):
    """A sample is a document; packed rows hold several, each with its own label."""

    name = "classification"
    unit = "documents"
    head = SEQUENCE_CLASSIFICATION
    row_targets = RowTargets.last_tokens
    reads_sample_labels = True

    def name_labels(self, data: DataConfig) -> Labels:
        is_single = data.problem_type is ProblemType.regression and not data.labels
        return Labels(tuple(data.labels or ()), 1 if is_single else None, data.problem_type.value)

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
        """Raises UserError for class weights that do not fit the labels."""
        keys: ClassificationConfig = options.keys
        problem_type = ProblemType(model_config.problem_type)
        _check_weights(keys.class_weights, model_config.num_labels, problem_type)
        return ClassificationLoss(
            problem_type, model_config.num_labels, keys.class_weights, sequence_part=sequence_part
        )

    def list_metrics(self, options: ObjectiveOptions) -> None:
        """Return None: they depend on the labels."""

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, ClassificationLoss)
        return (ErrorMetrics if loss.problem_type is ProblemType.regression else ClassMetrics)(loss, device)


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
