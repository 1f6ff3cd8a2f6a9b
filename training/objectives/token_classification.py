"""Classes of tokens: the cross entropy of `transformers` for its token classifiers, a mean over the labelled tokens of
the global batch.

Evaluations report precision, recall and F1 by entity over the whole file, as conlleval does: an entity is right where
its first word, its last word and its kind are. Tags are kinds with or without a prefix: B- or S- begins an entity, E-
or S- ends one, I- or none continues one of the same kind; O is none. N tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PretrainedConfig

from batch import Targets
from models.heads.head import Labels
from models.heads.token_classification import TOKEN_CLASSIFICATION
from models.losses.cross_entropy import Loss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.schema import DataConfig
from training.objectives.objective import Metrics, Objective, ObjectiveOptions

OUTSIDE, PREFIXES = "O", "BIES"
Entity = tuple[int, int, str]  # first word, the one after the last, kind


class TokenClassificationLoss:
    """The loss of the last stage of a token classifier. It also keeps what it predicts until `take_predicted` takes
    it."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self._predicted: list[torch.Tensor] = []

    def __call__(self, outputs: tuple[torch.Tensor, ...], targets: Targets) -> torch.Tensor:
        """outputs: hidden states [B, T, D], the head's matrix [C, D], and the document of each token in its row [B, T].
        targets: the class of each token that has one.

        Returns the sum of the tokens' losses over the denominator, fp32 at least.
        """
        hidden_states, weight, segment_ids = outputs
        indices = targets.indices
        dtype = torch.promote_types(weight.dtype, torch.float32)
        chosen = hidden_states.flatten(0, 1).index_select(0, indices)
        scores = F.linear(chosen.to(dtype), weight.to(dtype))
        actual = targets.ids.flatten().index_select(0, indices)
        rows = torch.arange(len(segment_ids), device=segment_ids.device).unsqueeze(1)
        documents = (rows * (segment_ids.shape[1] + 1) + segment_ids).flatten().index_select(0, indices)
        self._predicted.append(torch.stack([scores.detach().argmax(dim=1), actual, documents]))
        return (F.cross_entropy(scores, actual, reduction="sum") / targets.denominator).to(dtype)

    def take_predicted(self) -> list[torch.Tensor]:
        """Return, of the micro-batches since the last call, the predicted class of each labelled token, its class, and
        its document: int64 [3, N], the tokens of a document one after the other."""
        predicted, self._predicted = self._predicted, []
        return predicted


def split_tag(tag: str) -> tuple[str, str]:
    """Return prefix and kind of a tag; the kind of none is empty."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return (prefix, kind) if dash and prefix in PREFIXES else ("I", tag)


def list_entities(tags: Sequence[str], documents: Sequence[int]) -> set[Entity]:
    """Return the entities of words with these tags, none of which lies in two documents."""
    found: set[Entity] = set()
    first, before = 0, (OUTSIDE, "", -1)
    for place, (tag, document) in enumerate([*zip(tags, documents, strict=True), (OUTSIDE, -1)]):
        prefix, kind = split_tag(tag)
        continues = (kind, document) == before[1:] and prefix not in "BS" and before[0] not in "ES"
        if before[1] and not continues:
            found.add((first, place, before[1]))
        if not continues:
            first = place
        before = (prefix, kind, document)
    return found


class EntityMetrics:
    """The share of right tokens, and precision, recall and F1 by entity, over whole global batches and evaluations."""

    def __init__(self, loss: TokenClassificationLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._device)

    def _count_right(self, predicted: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [right tokens, tokens]."""
        counts = self._zeros()
        for said, actual, _ in predicted:
            counts += torch.stack([(said == actual).sum(), actual.new_tensor(len(actual))])
        return counts

    def add_step(self, counts: bool) -> None:
        predicted = self._loss.take_predicted()
        if counts:
            self._interval += self._count_right(predicted)

    def finish_interval(self) -> dict[str, float]:
        counts, self._interval = self._interval, self._zeros()
        dist.all_reduce(counts)
        right, total = counts.tolist()
        return {"accuracy": right / total} if total else {}

    def finish_evaluation(self) -> dict[str, float]:
        """Return `eval_accuracy`, `eval_precision`, `eval_recall` and `eval_f1`; 0 where there is nothing to divide by.
        All ranks call it."""
        predicted = self._loss.take_predicted()
        counts = torch.cat([self._count_right(predicted), self._count_entities(predicted)])
        dist.all_reduce(counts)
        right, total, found, said, there = counts.tolist()
        if not total:
            return {}
        return {
            "eval_accuracy": right / total,
            "eval_precision": found / said if said else 0.0,
            "eval_recall": found / there if there else 0.0,
            "eval_f1": 2 * found / (said + there) if said + there else 0.0,
        }

    def _count_entities(self, predicted: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [entities that are found, said, there]."""
        counts = torch.zeros(3, dtype=torch.float64, device=self._device)
        for each in predicted:
            *classes, documents = each.tolist()
            said, there = (
                list_entities([self._loss.labels[index] for index in indices], documents) for indices in classes
            )
            counts += torch.tensor([len(said & there), len(said), len(there)], device=self._device)
        return counts


class TokenClassification(Objective):
    """A sample is a text; its terms are the tokens with a label."""

    name = "token_classification"
    unit = "texts"
    head = TOKEN_CLASSIFICATION

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels(tuple(data.labels or ()))

    def build_loss(
        self,
        options: ObjectiveOptions,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss:
        return TokenClassificationLoss([model_config.id2label[index] for index in range(model_config.num_labels)])

    def list_metrics(self, options: ObjectiveOptions) -> tuple[str, ...]:
        return ("accuracy", "precision", "recall", "f1")

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, TokenClassificationLoss)
        return EntityMetrics(loss, device)
