"""Classes of tokens: the cross entropy of `transformers` for its token classifiers, a mean over the labelled tokens of
the global batch.

Evaluations report precision, recall and F1 by entity over the whole file, as conlleval does: an entity is right where
its first word, its last word and its kind are. Tags are kinds with or without a prefix: B- or S- begins an entity, E-
or S- ends one, I- or none continues one of the same kind; O is none. N tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch.nn import functional as F

from batch import Targets
from extensions.classification.documents import SHOWN
from extensions.classification.token_encoders import SYNONYMS
from extensions.classification.token_head import TOKEN_CLASSIFICATION
from models.heads.head import Labels
from models.losses.cross_entropy import Loss
from models.losses.metric_sums import MetricSums
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Metrics, Objective

OUTSIDE, PREFIXES = "O", "BIES"
Entity = tuple[int, int, str]  # first word, the one after the last, kind


def split_tag(tag: str, labels: Collection[str]) -> tuple[str, str]:
    """Return prefix and kind of a tag, of `PREFIXES` whatever the letters of its scheme; the kind of none is empty.
    labels: all tags that there are, which tell a prefix from a class such as "M-16"."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    if f"B-{kind}" in labels:
        prefix = SYNONYMS.get(prefix, prefix)
    return (prefix, kind) if dash and prefix in PREFIXES else ("I", tag)


def list_entities(tags: Sequence[str], documents: Sequence[int], labels: Collection[str] = ()) -> set[Entity]:
    """Return the entities of words with these tags, none of which lies in two documents. labels: see `split_tag`."""
    found: set[Entity] = set()
    first, before = 0, (OUTSIDE, "", -1)
    for place, (tag, document) in enumerate([*zip(tags, documents, strict=True), (OUTSIDE, -1)]):
        prefix, kind = split_tag(tag, labels)
        continues = (kind, document) == before[1:] and prefix not in "BS" and before[0] not in "ES"
        if before[1] and not continues:
            found.add((first, place, before[1]))
        if not continues:
            first = place
        before = (prefix, kind, document)
    return found


class TokenClassificationLoss:
    """The loss of the last stage of a token classifier. In an evaluation it also keeps what it predicts, since entities
    are counted at its end."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = list(labels)
        self.sums = (MetricSums("accuracy"),)
        # The predicted class of each labelled token, its class, and its document, int64 [3, N]: the tokens of a
        # document one after the other
        self._kept: list[torch.Tensor] = []

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
        self._add(scores.detach().argmax(dim=1), actual, segment_ids, indices)
        return (F.cross_entropy(scores, actual, reduction="sum") / targets.denominator).to(dtype)

    def _add(
        self, predicted: torch.Tensor, actual: torch.Tensor, segment_ids: torch.Tensor, indices: torch.Tensor
    ) -> None:
        self.sums[0].add((predicted == actual).sum()[None], len(actual))
        if torch.is_grad_enabled():
            return
        rows = torch.arange(len(segment_ids), device=segment_ids.device).unsqueeze(1)
        documents = (rows * (segment_ids.shape[1] + 1) + segment_ids).flatten().index_select(0, indices)
        self._kept.append(torch.stack([predicted, actual, documents]))

    def finish_evaluation(self, device: torch.device) -> dict[str, float]:
        """Return `precision`, `recall` and `f1` of the entities of all ranks, which all call it; 0 where there is
        nothing to divide by, and none of them for an evaluation without tokens."""
        kept, self._kept = self._kept, []
        counts = torch.zeros(4, dtype=torch.float64)  # tokens; entities that are found, predicted, there
        for each in kept:
            counts += self._count_entities(each)
        counts = counts.to(device)
        dist.all_reduce(counts)
        num_tokens, found, predicted, there = counts.tolist()
        if not num_tokens:
            return {}
        return {
            "precision": found / predicted if predicted else 0.0,
            "recall": found / there if there else 0.0,
            "f1": 2 * found / (predicted + there) if predicted + there else 0.0,
        }

    def _count_entities(self, kept: torch.Tensor) -> torch.Tensor:
        *classes, documents = kept.tolist()
        predicted, there = (list_entities([self._labels[i] for i in row], documents, self._labels) for row in classes)
        return torch.tensor([len(documents), len(predicted & there), len(predicted), len(there)])


class TokenClassification(Objective):
    """A sample is a text; its terms are the tokens with a label."""

    name = "token_classification"
    pipeline_tag = "token-classification"
    unit = "texts"
    head = TOKEN_CLASSIFICATION
    shown = SHOWN

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels(tuple(data.labels or ()))

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        architecture = stage.architecture
        return TokenClassificationLoss([architecture.id2label[index] for index in range(architecture.num_labels)])

    def metrics(self, loss: TokenClassificationLoss, device: torch.device) -> Metrics:
        return Metrics(loss.sums, device, loss.finish_evaluation)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return ("accuracy", "precision", "recall", "f1")
