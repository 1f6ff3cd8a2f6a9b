"""Queries, each with a document that answers it and documents that do not (hard negatives).

Embeddings:  the query, its positive and each negative are texts of their own, `tokenizer(prompt + text)`
Reranking:   the positive and each negative are read together with the query, `tokenizer(query, document)`

The samples of a record stay together, the positive before the negatives. A text that is too long loses tokens before
those that the tokenizer puts at the end, as where the tokenizer itself truncates. No token is a target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from console import pluralize
from data.counts import ContentCounts
from data.encoders.control_tokens import Guard
from data.encoders.kind import DataKind
from data.encoders.messages import refuse_media
from data.encoders.segments import CountingEncoder, check_filled, get_fields
from data.encoders.texts import tokenize_texts
from data.options import ControlTokens
from data.sample import Group, Sample
from errors import UserError


@dataclass(frozen=True)
class RetrievalEncoder(CountingEncoder):
    """Records with a query, a positive, and a list of negatives, of which the first `num_negatives` are taken."""

    query_field: str = "query"
    positive_field: str = "positive"
    negatives_field: str = "negatives"
    num_negatives: int = 0
    control_tokens: ControlTokens | None = None

    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> Group | Sample:
        """Return the samples of one record. counts: what was found is added to it. Raises `UserError` naming `location`
        for a field that is missing or empty, and for too few negatives.
        """
        refuse_media(record, location)
        guard = Guard(tokenizer, self.control_tokens, counts or ContentCounts())
        query, *documents = (
            guard.protect_text(check_filled(text, where), where) for text, where in self._read_texts(record, location)
        )
        samples = []
        for prompt, texts in self._list_samples(query, documents):
            sample = tokenize_texts(texts, location, guard)
            sample["num_first"] += _count_tokens(prompt, tokenizer)
            sample["label"] = []
            samples.append(sample)
        return tuple(samples) if len(samples) > 1 else samples[0]

    def _list_samples(self, query: str, documents: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        """Return of each sample the prompt with which its last text begins, and its texts."""
        raise NotImplementedError

    def _read_texts(self, record: dict, location: str) -> list[tuple[object, str]]:
        """Return the query, the positive and the negatives, each with what errors call it."""
        names = {"data.query_field": self.query_field, "data.positive_field": self.positive_field}
        if self.num_negatives:
            names["data.negatives_field"] = self.negatives_field
        query, positive, *given = get_fields(record, names, location)
        read = [
            (query, f"{location}: field '{self.query_field}'"),
            (positive, f"{location}: field '{self.positive_field}'"),
        ]
        for value in given:
            negatives = value if isinstance(value, list) else [value]
            if len(negatives) < self.num_negatives:
                raise UserError(
                    f"{location}: field '{self.negatives_field}' has {pluralize(len(negatives), 'text')}, and "
                    f"data.num_negatives={self.num_negatives}; give a lower number, or remove the record"
                )
            where = f"{location}: field '{self.negatives_field}', text"
            read += [(text, f"{where} {number}") for number, text in enumerate(negatives[: self.num_negatives], 1)]
        return read


@lru_cache(maxsize=4)
def _count_tokens(prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class EmbeddingEncoder(RetrievalEncoder):
    """Each text by itself, the query first. query_prompt, document_prompt: the text before each."""

    query_prompt: str = ""
    document_prompt: str = ""

    def _list_samples(self, query: str, documents: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        given = [(self.query_prompt, query), *((self.document_prompt, document) for document in documents)]
        return [(prompt, [prompt + text]) for prompt, text in given]


@dataclass(frozen=True)
class RerankEncoder(RetrievalEncoder):
    """Each document together with the query."""

    def _list_samples(self, query: str, documents: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        return [("", [query, document]) for document in documents]


_TEXTS_TOGETHER = "the texts of a query are rows of one micro-batch"
_PART_OF_TEXT = "a part of a text is not what belongs to its query"
_NEGATIVES = ("negative", "num_negatives")
KINDS = (
    DataKind(
        "embedding",
        EmbeddingEncoder,
        task="embedding",
        together=("query", "positive"),
        further=_NEGATIVES,
        is_whole=True,
        not_split=_PART_OF_TEXT,
        not_streamed=_TEXTS_TOGETHER,
    ),
    DataKind(
        "rerank",
        RerankEncoder,
        task="rerank",
        together=("positive",),
        further=_NEGATIVES,
        is_whole=True,
        not_split=_PART_OF_TEXT,
        not_streamed=_TEXTS_TOGETHER,
    ),
)
