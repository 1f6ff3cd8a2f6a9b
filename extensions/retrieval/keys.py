"""The keys of embeddings and rerankers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from training.config.ranges import positive, zero_or_more


class Pooling(Enum):
    """The hidden state that represents a text: that of its last token, or the mean over its tokens."""

    last = "last"
    mean = "mean"


class RerankLossType(Enum):
    """The loss of a query's documents: cross entropy of the softmax over their scores, or the mean of each one's binary
    cross entropy."""

    softmax = "softmax"
    binary = "binary"


@dataclass
class EmbeddingConfig:
    """The group `embedding`."""

    pooling: Pooling = Pooling.last
    temperature: float = positive(default=0.05)  # by which cosines are divided in the loss
    # Subtracted from the cosine of a query and its own document (1902.08564)
    margin: float = zero_or_more(note="0 turns it off", default=0.0)
    # The first dimensions of the vectors that are trained to be vectors too (2205.13147); None: no others
    matryoshka_dims: list[int] | None = None


@dataclass
class RerankConfig:
    """The group `rerank`."""

    loss_type: RerankLossType = RerankLossType.softmax


@dataclass
class DataKeys:
    """Further keys of `data`. The fields are those of a record."""

    query_field: str | None = None
    positive_field: str | None = None  # a document that answers the query
    negatives_field: str | None = None  # documents that do not, a list of texts
    num_negatives: int = zero_or_more(default=0)  # of each record, the first ones of its list; as many for each
    query_prompt: str = ""  # the text before each query (data=embedding), saved with the export
    document_prompt: str = ""  # the text before each document (data=embedding), saved with the export
